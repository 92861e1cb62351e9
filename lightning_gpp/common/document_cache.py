"""A folder of documents that took time to make, found again by what they were made from.

A document is looked up by a hash of its key, and the key is in the document too: a file whose key
is not the one asked for is no hit. Files are written aside and moved into place, so readers never
see half of one, and of several writers the last wins. A file that cannot be read is reported and
made again; a folder that cannot be written is reported, and nothing is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

FOLDER_VARIABLE = "LIGHTNING_GPP_CACHE"
"""Environment variable that names the folder; empty: nothing is kept."""

FORMAT, VERSION = "lightning_gpp.cached", 1

T = TypeVar("T")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DocumentCache:
    """Documents in a folder.

    Attributes:
        folder: where they are; it is made when the first is written.
    """

    folder: Path

    def path(self, kind: str, key: Mapping[str, Any]) -> Path:
        """File of a document.

        Args:
            kind: what it is (``"profile"``), the beginning of the file's name.
            key: plain data that say what it was made from.
        """
        return self.folder / f"{kind}-{content_hash(key)}.json"

    def read(self, kind: str, key: Mapping[str, Any], parse: Callable[[str], T]) -> T | None:
        """A document; None where there is none that can be used.

        Args:
            kind: as in :meth:`path`.
            key: likewise.
            parse: makes the document's text what it stands for; ValueError: it is broken.
        """
        path = self.path(kind, key)
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            _logger.warning("the cached %s cannot be read and is made again: %s", kind, error)
            return None
        try:
            return parse(_content(text, key))
        except ValueError as error:
            _logger.warning("the cached %s %s is broken and is made again: %s", kind, path, error)
            return None

    def write(self, kind: str, key: Mapping[str, Any], document: str) -> None:
        """Keeps a document, a text."""
        path = self.path(kind, key)
        form = {"format": FORMAT, "version": VERSION, "key": key, "document": document}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _write_aside(path, json.dumps(form, indent=1, allow_nan=False))
        except OSError as error:
            _logger.warning("the %s cannot be kept in %s: %s", kind, self.folder, error)


def default_folder() -> Path | None:
    """The folder that the environment names, or the platform's for caches; None: none is wanted."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named is not None:
        return Path(named) if named else None
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "lightning_gpp"


def content_hash(data: Any) -> str:
    """Hash of plain data, or of a text.

    >>> content_hash({"a": 1, "b": 2}) == content_hash({"b": 2, "a": 1})
    True
    """
    text = json.dumps(data, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _content(text: str, key: Mapping[str, Any]) -> str:
    data = json.loads(text)  # its error is a ValueError
    if not isinstance(data, dict) or (data.get("format"), data.get("version")) != (FORMAT, VERSION):
        raise ValueError(f'expected "format": "{FORMAT}" and "version": {VERSION}')
    if data.get("key") != json.loads(json.dumps(key)):
        raise ValueError("its key is another one")
    document = data.get("document")
    if not isinstance(document, str):
        raise ValueError('expected a text at "document"')
    return document


def _write_aside(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
