"""What the readers of published formats share."""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter

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
