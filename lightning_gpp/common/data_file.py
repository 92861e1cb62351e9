"""Reading text, JSON and YAML files, with errors that name file and line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lightning_gpp.common.strict_json import JsonFormError, parse_json

YAML_SUFFIXES = (".yaml", ".yml")


def read_text(path: str | Path, expected: str) -> str:
    """The text of a file, in UTF-8 (a byte order mark is no part of it).

    Args:
        path: the file.
        expected: what should be in it, for the error.

    Raises:
        ValueError: there is no such file, or it is not text.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"no file {str(file)!r}; expected {expected}")
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file.name}: not a text file in UTF-8 ({error}); expected {expected}"
        ) from error


def read_data_file(path: str | Path) -> Any:
    """The plain data of a file: YAML where its name ends like that, JSON otherwise.

    Raises:
        ValueError: it is not JSON or YAML; the text names file and line.
        FileNotFoundError: there is no such file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; expected a JSON or YAML file")
    text = read_text(path, "JSON or YAML")
    if path.suffix.lower() in YAML_SUFFIXES:
        return _yaml(text, path)
    return parse_json(text, str(path))


def _yaml(text: str, path: Path) -> Any:
    import yaml  # comes with Hydra; loaded where a file needs it

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """YAML 1.2 numbers: PyYAML takes ``9e11`` for a text."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            """Refuses keys that are there twice, of which PyYAML would take the last."""
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            if twice := [key for key in keys if keys.count(key) > 1]:
                raise yaml.constructor.ConstructorError(
                    problem=f"key {twice[0]!r} is there twice; keep one",
                    problem_mark=node.start_mark,
                )
            found: dict[Any, Any] = super().construct_mapping(node, deep)
            return found

    number = re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise JsonFormError(f"{path}{line}: not YAML: {error.problem}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise JsonFormError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise JsonFormError(f"{path}: not YAML that can be read: too deeply nested") from error
