"""Seconds of operators on all devices, forwards and backwards, by the roofline.

As in :mod:`lightning_gpp.cost.roofline`, over the part that a device has: its floating-point
operations at its sustained speed or its bytes at its memory bandwidth, whichever takes longer, and
a launch. A backward is a pass per gradient for a product, one pass for anything else.
"""

from __future__ import annotations

import numpy as np

from lightning_gpp.spmd.costs.share_cost import ShareCost, ShareLine
from lightning_gpp.spmd.costs.speeds import DeviceSpeeds
from lightning_gpp.spmd.operator_graph import SpmdGraph, SpmdOperator, SpmdValue
from lightning_gpp.spmd.placement import Placement
from lightning_gpp.spmd.program import Option

FREE_KINDS = frozenset(
    (
        *("view", "unflatten", "unsqueeze", "squeeze", "transpose", "t", "permute", "select"),
        *("slice", "narrow", "expand", "alias", "detach", "split", "split_with_sizes", "chunk"),
        *("unbind", "swapaxes", "flatten", "lift_fresh"),
    )
)
"""Operators that move nothing: their outputs are the memory of their inputs."""


class ComputationCosts:
    """What operators take.

    Args:
        graph: the model.
        speeds: of the devices.
        is_training: whether there is a backward.
    """

    def __init__(self, graph: SpmdGraph, speeds: DeviceSpeeds, *, is_training: bool = True) -> None:
        self._graph = graph
        self._speeds = speeds
        self._is_training = is_training

    def halves(
        self,
        operator: SpmdOperator,
        inputs: tuple[Placement, ...],
        outputs: tuple[Placement, ...],
        option: Option = Option.PLAIN,
    ) -> tuple[tuple[ShareCost, ...], tuple[ShareCost, ...]]:
        """An operator on all devices, each on its part: its forward, and its backward."""
        passes = self._num_backward(operator)
        forward = self._of(operator, inputs, outputs, Option.PLAIN, 1)
        return forward, self._of(operator, inputs, outputs, option, passes) if passes else ()

    def update(self, value: SpmdValue, placement: Placement) -> tuple[ShareCost, ...]:
        """The optimizer's step of a parameter that is kept in a placement."""
        seconds = value.size_bytes * self._speeds.update_s_per_byte
        if not (self._is_training and value.requires_grad and seconds.any()):
            return ()
        if placement.is_shard:
            return ((ShareLine(0 * seconds, seconds, placement.units or 0),),)
        return ((ShareLine(seconds, 0 * seconds),),)

    def _of(
        self,
        operator: SpmdOperator,
        inputs: tuple[Placement, ...],
        outputs: tuple[Placement, ...],
        option: Option,
        passes: int,
    ) -> tuple[ShareCost, ...]:
        if operator.kind in FREE_KINDS:
            return ()
        placed = operator.operands(inputs, outputs)
        sizes = [(self._graph.value_of[name].size_bytes, place) for name, place in placed]
        part = sum(size for size, place in sizes if place.is_shard)
        whole = sum(size for size, place in sizes if not place.is_shard)
        dealt = next((place for _, place in sizes if place.is_shard), None)
        flops = operator.flops
        if dealt is None:
            return (self._cost(passes, None, (0.0, flops), (0.0, whole)),)
        if option is Option.SUFFICIENT_FACTORS:
            # All devices compute the gradient of the weight as a whole.
            return (
                self._cost(passes - 1, dealt, (flops, 0.0), (part, whole)),
                self._cost(1, None, (0.0, flops), (0.0, part + whole)),
            )
        return (self._cost(passes, dealt, (flops, 0.0), (part, whole)),)

    def _num_backward(self, operator: SpmdOperator) -> int:
        """How many passes of the forward's size the backward has."""
        value_of = self._graph.value_of
        if not self._is_training or not any(value_of[o].requires_grad for o in operator.outputs):
            return 0
        wanted = sum(value_of[name].requires_grad for name in operator.inputs)
        return min(wanted, 2) if operator.flops else 1

    def _cost(
        self,
        passes: int,
        dealt: Placement | None,
        flops: tuple[float, float],
        moved_bytes: tuple[float, float],
    ) -> ShareCost:
        """Passes over what is dealt and what is whole."""
        speeds = self._speeds
        units = 0 if dealt is None else dealt.units or 0
        lines = tuple(
            ShareLine(
                passes * (speeds.launch_s + whole / per_s),
                passes * part / per_s,
                units,
            )
            for (part, whole), per_s in (
                (flops, speeds.flops_per_s),
                (moved_bytes, speeds.memory_bytes_per_s),
            )
            if part or whole or not np.all(speeds.launch_s == 0)
        )
        return lines or (ShareLine(speeds.launch_s * 0, speeds.launch_s * 0),)
