"""Bytes that every device holds at the end of a forward: parameters, optimizer state, activations.

Everything that a backward may read is taken as held: what operators and conversions make of tensors
with a gradient, views excepted. So it is an upper bound, but for what an operator needs for itself.
"""

from __future__ import annotations

import numpy as np

from lightning_gpp.spmd.costs.computations import FREE_KINDS
from lightning_gpp.spmd.costs.share_cost import Parts, Vector
from lightning_gpp.spmd.operator_graph import SpmdGraph, SpmdOperator, SpmdValue
from lightning_gpp.spmd.placement import Placement


class MemoryCosts:
    """What instructions leave behind on every device; arrays of shape ``(num_devices,)``.

    Args:
        graph: the model.
        parts: what the shares come to.
        optimizer_tensors: tensors of a parameter's size that training holds beside it, its gradient
            included (Adam: 3, SGD: 1).
        is_training: whether there is a backward.
    """

    def __init__(
        self,
        graph: SpmdGraph,
        parts: Parts,
        *,
        optimizer_tensors: int = 3,
        is_training: bool = True,
    ) -> None:
        self._graph = graph
        self._parts = parts
        self._per_parameter = 1 + (optimizer_tensors if is_training else 0)
        self._is_training = is_training

    def local_bytes(self, value: SpmdValue, placement: Placement) -> Vector:
        """A tensor's bytes on every device."""
        return value.size_bytes * self._parts.of_placement(placement)

    def stored(self, value: SpmdValue, placement: Placement) -> Vector:
        """A parameter or buffer with its gradient and optimizer state."""
        times = self._per_parameter if value.requires_grad else 1
        return times * self.local_bytes(value, placement)

    def made(self, operator: SpmdOperator, outputs: tuple[Placement, ...]) -> Vector:
        """What an operator makes."""
        found = np.zeros(self._parts.num_devices)
        if operator.kind in FREE_KINDS:
            return found
        for name, placement in zip(operator.outputs, outputs):
            found = found + self.kept(self._graph.value_of[name], placement)
        return found

    def kept(self, value: SpmdValue, placement: Placement) -> Vector:
        """A tensor, where a backward may read it."""
        if not (self._is_training and value.requires_grad):
            return np.zeros(self._parts.num_devices)
        return self.local_bytes(value, placement)
