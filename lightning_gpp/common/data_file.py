"""Reading text, JSON and YAML files, with errors that name file and line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_gpp.common.strict_json import JsonFormat, JsonFormError, parse_json

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


def read_document(path: str | Path, kinds: Mapping[JsonFormat, type]) -> Any:
    """Reads a document of one of some forms from a JSON or YAML file.

    Args:
        path: the file.
        kinds: form -> the dataclass that such documents hold.

    Raises:
        ValueError: it is of another form; the text names the file, the key, and what was expected.
        FileNotFoundError: there is no such file.
    """
    data = read_data_file(path)
    form = data.get("format") if isinstance(data, Mapping) else None
    for known, kind in kinds.items():
        if form == known.name:
            return known.from_data(kind, data, source=str(path))
    expected = " or ".join(f'"{known.name}"' for known in kinds)
    raise JsonFormError(f'{path}: expected "format": {expected}, got {form!r}')


def _yaml(text: str, path: Path) -> Any:
    """YAML 1.2 as Hydra reads it: ``9e11`` is a number, and no key is there twice."""
    import yaml  # these come with Hydra, and are loaded where a file needs them
    from omegaconf import OmegaConf

    try:
        return OmegaConf.to_container(OmegaConf.create(text))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise JsonFormError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
