"""Reading a JSON or YAML file into plain data, with errors that name file and line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from lightning_gpp.strict_json import JsonFormError

YAML_SUFFIXES = (".yaml", ".yml")


def read_data_file(path: str | Path) -> Any:
    """The plain data of a file: YAML where its name ends like that, JSON otherwise.

    Raises:
        JsonFormError: it is not JSON or YAML; the text names file and line.
        FileNotFoundError: there is no such file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; expected a JSON or YAML file")
    text = path.read_text(encoding="utf-8")
    if path.suffix.lower() in YAML_SUFFIXES:
        return _yaml(text, path)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise JsonFormError(f"{path}: not JSON: {error}") from error


def _yaml(text: str, path: Path) -> Any:
    import yaml  # comes with Hydra; loaded where a file needs it

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """YAML 1.2 numbers: PyYAML takes ``9e11`` for a text."""

    number = re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        raise JsonFormError(f"{path}: not YAML: {error}") from error
