"""Looking up fields of a JSON document of a foreign format, with errors that name the place.

Unlike our own documents (:mod:`lightning_gpp.common.strict_json`) these may hold more than we read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_gpp.common.checks import is_number, short_repr
from lightning_gpp.common.strict_json import parse_json


@dataclass(frozen=True, slots=True)
class JsonObject:
    """An object of a document.

    Attributes:
        data: its keys and values.
        where: its place, for errors (``"resnet.json: nodes[3]"``).
    """

    data: Mapping[str, Any]
    where: str

    def number(self, key: str) -> float:
        """A number of at least 0."""
        value = self._get(key, "a number of at least 0")
        if not is_number(value) or value < 0:
            raise self._wrong(key, "a number of at least 0", value)
        return float(value)

    def positive(self, key: str) -> float:
        """A number above 0."""
        value = self.number(key)
        if not value:
            raise self._wrong(key, "a number above 0", value)
        return value

    def integer(self, key: str) -> int:
        """A whole number of at least 0."""
        value = self.number(key)
        if value != int(value):
            raise self._wrong(key, "a whole number", value)
        return int(value)

    def text(self, key: str) -> str:
        """A text with at least one character."""
        value = self._get(key, "a text")
        if not isinstance(value, str) or not value:
            raise self._wrong(key, "a text", value)
        return value

    def objects(self, key: str) -> list[JsonObject]:
        """An array of objects."""
        value = self._get(key, "an array of objects")
        if not isinstance(value, list):
            raise self._wrong(key, "an array of objects", value)
        return [as_object(item, f"{self.where}: {key}[{i}]") for i, item in enumerate(value)]

    def child(self, key: str) -> JsonObject:
        """An object."""
        return as_object(self._get(key, "an object"), f"{self.where}: {key}")

    def numbered_keys(self) -> Iterator[tuple[int, str]]:
        """Its keys, each with the whole number that it spells.

        Raises:
            ValueError: one spells none.
        """
        for key in self.data:
            if not key.isdecimal():
                raise ValueError(f"{self.where}: expected whole numbers as keys, got {key!r}")
            yield int(key), key

    def _get(self, key: str, expected: str) -> Any:
        if key not in self.data:
            raise ValueError(f"{self.where}: key {key!r} is missing; expected {expected}")
        return self.data[key]

    def _wrong(self, key: str, expected: str, value: object) -> ValueError:
        return ValueError(f"{self.where}: {key}: expected {expected}, got {short_repr(value)}")


def as_object(data: object, where: str) -> JsonObject:
    """The object at a place.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"{where}: expected an object, got {short_repr(data)}")
    return JsonObject(data, where)


def load_object(text: str, source: str) -> JsonObject:
    """The document in a text.

    Args:
        text: JSON.
        source: name of the file, for errors.

    Raises:
        ValueError: it is not JSON, or not an object.
    """
    return as_object(parse_json(text, source), source)
