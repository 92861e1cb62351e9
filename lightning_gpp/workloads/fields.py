"""Helpers that the readers of published formats share."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from lightning_gpp.common.graph_order import find_cycle, topological_order
from lightning_gpp.graph import TensorSpec, Value

ITEM_BYTES = 4
"""Published profiles are of float32 models."""


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
    place = {}
    for index, name in enumerate(readers):
        digits = re.search(r"\d+$", name)
        place[name] = int(digits.group()) if digits else math.inf, index
    names = sorted(readers, key=place.__getitem__)
    number = {name: index for index, name in enumerate(names)}
    successors = {number[name]: [number[to] for to in targets] for name, targets in readers.items()}
    if cycle := find_cycle(successors):
        text = " -> ".join(names[index] for index in [*cycle, cycle[0]])
        raise ValueError(
            f"{where}: expected a graph without cycles, but {text} is one; remove an edge of it"
        )
    return [names[index] for index in topological_order(successors)]


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
