"""A folder that caches documents which took time to make.

A document is looked up by a hash of its key. Files are written aside and moved into place, so
readers never see half of one, and of several writers the last wins. A file that cannot be read is
reported and made again; a folder that cannot be written is reported, and nothing is kept.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

FOLDER_VARIABLE = "LIGHTNING_GPP_CACHE"
"""Environment variable that names the folder; empty: nothing is kept."""

T = TypeVar("T")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DocumentCache:
    """Documents in a folder.

    Attributes:
        folder: where they are kept; created with the first document. None keeps nothing.
    """

    folder: Path | None

    def read(
        self, kind: str, key: Mapping[str, Any], parse: Callable[[str], T]
    ) -> tuple[T, Path] | None:
        """A document and its file; None where there is none that can be used.

        Args:
            kind: what it is (``"profile"``), the beginning of the file's name.
            key: plain data that say what it was made from.
            parse: makes the document's text what it stands for; ValueError: it is broken.
        """
        if self.folder is None:
            return None
        path = self.folder / _name(kind, key)
        try:
            return parse(path.read_text(encoding="utf-8")), path
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            _logger.warning("the cached %s %s is broken and is made again: %s", kind, path, error)
        return None

    def write(self, kind: str, key: Mapping[str, Any], document: str) -> None:
        """Keeps a document, a text."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / _name(kind, key)
            aside = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.tmp")
            aside.write_text(document, encoding="utf-8")
            os.replace(aside, path)
        except OSError as error:
            _logger.warning("the %s cannot be kept in %s: %s", kind, self.folder, error)


def _name(kind: str, key: Mapping[str, Any]) -> str:
    return f"{kind}-{content_hash(key)}.json"


def default_folder() -> Path | None:
    """The folder that the environment names, or one in that for caches; None: none is wanted."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named is not None:
        return Path(named) if named else None
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_gpp"


def folder_of(given: bool | str | Path) -> Path | None:
    """The folder that an option names; True: the default one, False: nothing is kept."""
    return default_folder() if given is True else Path(given) if given else None


def content_hash(data: Any) -> str:
    """Hash of plain data, or of a text.

    >>> content_hash({"a": 1, "b": 2}) == content_hash({"b": 2, "a": 1})
    True
    """
    text = json.dumps(data, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
