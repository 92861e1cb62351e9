"""What the readers of published formats share: fields with errors that name the place, values."""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any

from lightning_gpp.common.checks import LARGEST, is_number, short_repr
from lightning_gpp.common.strict_json import parse_json
from lightning_gpp.graph import TensorSpec, Value

ITEM_BYTES = 4
"""Published profiles are of float32 models."""

AMOUNT = "a number of at least 0"


def quantity(text: str, where: str) -> float:
    """A number that is not negative (and no more than any real quantity).

    Raises:
        ValueError: it is none; the text begins with ``where``.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= LARGEST:
        raise ValueError(f"{where}: expected {AMOUNT}, got {text.strip()!r}")
    return number


def execution_order(readers: Mapping[str, Iterable[str]], where: str) -> list[str]:
    """Names in topological order; of those that can come next, the one with the lowest number.

    Profilers number operators as the model calls them (``node12``), so this is the order of the
    model's own forward, branch after branch.

    Args:
        readers: name -> names that read from it; all names are keys.
        where: the file, for the error.

    Raises:
        ValueError: there is a cycle.
    """
    sorter = TopologicalSorter(dict.fromkeys(readers, ()))
    for name, targets in readers.items():
        for target in targets:
            sorter.add(target, name)
    try:
        sorter.prepare()
    except CycleError as error:
        cycle = " -> ".join(error.args[1])
        raise ValueError(
            f"{where}: expected a graph without cycles, but {cycle} is one; remove an edge of it"
        ) from error
    place = {}
    for index, name in enumerate(readers):
        digits = re.search(r"\d+$", name)
        place[name] = int(digits.group()) if digits else math.inf, index
    ready: list[tuple[tuple[float, int], str]] = []
    order: list[str] = []
    while sorter.is_active():
        for name in sorter.get_ready():
            heapq.heappush(ready, (place[name], name))
        order.append(heapq.heappop(ready)[1])
        sorter.done(order[-1])
    return order


def scope_of(name: str) -> str:
    """The name as that of a numbered module, which texts join to ranges (``node.4-17``).

    >>> scope_of("node4"), scope_of("classifier")
    ('node.4', 'classifier')
    """
    return re.sub(r"(?<=[^\d.])(\d+)$", r".\1", name)


def batch_value(name: str, sizes_bytes: Iterable[float], samples: int) -> Value:
    """A value of float32 tensors that are so large for a number of samples (rounded up)."""
    tensors = []
    for size_bytes in sizes_bytes:
        features = math.ceil(size_bytes / ITEM_BYTES / samples)
        tensors.append(TensorSpec((samples, features), "float32", batch_dim=0))
    return Value(name, tuple(tensors))


@dataclass(frozen=True, slots=True)
class JsonObject:
    """An object of a JSON document of a foreign format, which may hold more than we read.

    Attributes:
        data: its keys and values.
        where: its place, for errors (``"resnet.json: nodes[3]"``).
    """

    data: Mapping[str, Any]
    where: str

    @classmethod
    def of(cls, data: object, where: str) -> JsonObject:
        """The object at a place.

        Raises:
            ValueError: it is something else; so does every method where a field is.
        """
        if not isinstance(data, Mapping):
            raise ValueError(f"{where}: expected an object, got {short_repr(data)}")
        return cls(data, where)

    @classmethod
    def load(cls, text: str, source: str) -> JsonObject:
        """The document in a text of a file."""
        return cls.of(parse_json(text, source), source)

    def number(self, key: str) -> float:
        """A number of at least 0."""
        value = self._get(key, AMOUNT)
        self._check(is_number(value) and value >= 0, key, AMOUNT)
        return float(value)

    def positive(self, key: str) -> float:
        """A number above 0."""
        value = self.number(key)
        self._check(value > 0, key, "a number above 0")
        return value

    def integer(self, key: str) -> int:
        """A whole number of at least 0."""
        value = self.number(key)
        self._check(value == int(value), key, "a whole number")
        return int(value)

    def text(self, key: str) -> str:
        """A text with at least one character."""
        value = self._get(key, "a text")
        self._check(isinstance(value, str) and bool(value), key, "a text")
        return str(value)

    def objects(self, key: str) -> list[JsonObject]:
        """An array of objects."""
        value = self._get(key, "an array of objects")
        self._check(isinstance(value, list), key, "an array of objects")
        return [JsonObject.of(item, f"{self.where}: {key}[{i}]") for i, item in enumerate(value)]

    def child(self, key: str) -> JsonObject:
        """An object."""
        return JsonObject.of(self._get(key, "an object"), f"{self.where}: {key}")

    def numbered_keys(self) -> Iterator[tuple[int, str]]:
        """Its keys, each with the whole number that it spells."""
        for key in self.data:
            if not key.isdecimal():
                raise ValueError(f"{self.where}: expected whole numbers as keys, got {key!r}")
            yield int(key), key

    def _get(self, key: str, expected: str) -> Any:
        if key not in self.data:
            raise ValueError(f"{self.where}: key {key!r} is missing; expected {expected}")
        return self.data[key]

    def _check(self, is_right: bool, key: str, expected: str) -> None:
        if not is_right:
            got = short_repr(self.data[key])
            raise ValueError(f"{self.where}: {key}: expected {expected}, got {got}")
