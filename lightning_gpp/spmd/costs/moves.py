"""Seconds of what moves tensors between devices, with its ways to do it.

The table of :class:`~lightning_gpp.spmd.program.Conversion` in costs: what is done forwards and
backwards for every pair of placements.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_gpp.cluster import BUCKET_BYTES
from lightning_gpp.spmd.costs.collective_times import AlphaBeta, CollectiveTimes
from lightning_gpp.spmd.costs.share_cost import ShareCost, ShareLine
from lightning_gpp.spmd.gradient_buckets import is_summed_later
from lightning_gpp.spmd.operator_graph import SpmdOperator, SpmdValue
from lightning_gpp.spmd.placement import Placement, PlacementKind
from lightning_gpp.spmd.program import Conversion, Method

Ways = dict[Method, tuple[ShareCost, ...]]
"""How something can be moved, and what each takes."""

TwoWays = tuple[tuple[ShareCost, ...], tuple[ShareCost, ...]]
"""What something takes forwards, and backwards."""

_NOTHING: Ways = {Method.NONE: ()}

_R, _SAME = PlacementKind.REPLICATE_SUMMED, PlacementKind.REPLICATE
_S, _P = PlacementKind.SHARD, PlacementKind.PARTIAL

FORWARD = {
    (_S, _R): "gather",
    (_S, _SAME): "gather",
    (_P, _S): "scatter",
    (_P, _R): "all_reduce",
    (_P, _SAME): "all_reduce",
    (_S, _S): "exchange",
}
"""Collective of a conversion forwards; none for the other pairs. Backwards, a conversion is that of
the gradients, from the target's dual to the source's (:attr:`Placement.dual`)."""


@dataclass(frozen=True, slots=True)
class ConversionWays:
    """How a conversion can be done, each way on its own."""

    forward: Ways
    backward: Ways


class MoveCosts:
    """What conversions, inputs and outputs take.

    Args:
        times: of collectives over all devices.
        num_devices: how many.
        is_training: whether there is a backward.
    """

    def __init__(
        self, times: CollectiveTimes, num_devices: int, *, is_training: bool = True
    ) -> None:
        self._times = times
        self._num_devices = num_devices
        self._is_training = is_training

    def _flows(self, value: SpmdValue) -> bool:
        return self._is_training and value.requires_grad

    def conversion(self, value: SpmdValue, source: Placement, target: Placement) -> ConversionWays:
        """Ways from one placement to another."""
        size = value.size_bytes
        forward = self._collective(size, source, target)
        if not self._flows(value):
            return ConversionWays(forward, _NOTHING)
        backward = self._collective(size, target.dual, source.dual)
        direct = Conversion(value.name, source, target, Method.NONE, Method.DIRECT)
        if is_summed_later(value, direct) and Method.DIRECT in backward:
            in_bucket = self._flat(self._times.all_reduce.in_bucket_s(size, BUCKET_BYTES))
            backward = {**backward, Method.DIRECT: (in_bucket,)}
        return ConversionWays(forward, backward)

    def _collective(self, size_bytes: float, source: Placement, target: Placement) -> Ways:
        name = FORWARD.get((source.kind, target.kind))
        if name is None or source == target or self._num_devices == 1:
            return _NOTHING
        times = self._times
        if name == "gather":
            return self._shards(size_bytes, source, times.all_gather, times.broadcast)
        if name == "scatter":
            return self._shards(size_bytes, target, times.reduce_scatter, times.reduce)
        if name == "exchange":
            line = times.all_to_all
            return {Method.DIRECT: (self._padded(line, size_bytes, source, target),)}
        both_s = times.reduce_scatter.seconds(size_bytes) + times.all_gather.seconds(size_bytes)
        return {
            Method.DIRECT: (self._flat(times.all_reduce_s(size_bytes)),),
            Method.SCATTER_GATHER: (self._flat(both_s),),
        }

    def _shards(
        self, size_bytes: float, shard: Placement, padded: AlphaBeta, single: AlphaBeta
    ) -> Ways:
        grouped_s = self._num_devices * single.alpha_s + single.beta_s_per_byte * size_bytes
        return {
            Method.PADDED: (self._padded(padded, size_bytes, shard),),
            Method.GROUPED: (self._flat(grouped_s),),
        }

    def _flat(self, seconds: float) -> ShareCost:
        zeros = np.zeros(self._num_devices)
        return (ShareLine(zeros + seconds, zeros),)

    def _padded(self, line: AlphaBeta, size_bytes: float, *shards: Placement) -> ShareCost:
        """All parts as long as the largest: devices times it in bytes."""
        ones = np.ones(self._num_devices)
        slope = line.beta_s_per_byte * size_bytes * self._num_devices
        return tuple(
            ShareLine(ones * line.alpha_s, ones * slope, shard.units or 0) for shard in shards
        )

    def factors(
        self, operator: SpmdOperator, values: dict[str, SpmdValue], placed: dict[str, Placement]
    ) -> Ways:
        """Gathering a layer's input and its output's gradient, backwards.

        Args:
            operator: the layer.
            values: all values by name.
            placed: placements of its inputs and outputs.
        """
        names = [name for name in (*operator.inputs, *operator.outputs) if placed[name].is_shard]
        ways = [
            self._shards(
                values[name].size_bytes,
                placed[name],
                self._times.all_gather,
                self._times.broadcast,
            )
            for name in names
        ]
        return {
            method: tuple(cost for way in ways for cost in way[method])
            for method in (Method.PADDED, Method.GROUPED)
        }

    def receive(self, value: SpmdValue, placement: Placement) -> TwoWays:
        """An input from rank 0, and its gradient back."""
        times, size = self._times, value.size_bytes
        forward, back = times.broadcast, AlphaBeta()
        if placement.is_shard:
            forward = back = times.root
        elif placement.kind is _R:
            back = times.reduce
        return self._both(value, forward.seconds(size), back.seconds(size))

    def give(self, value: SpmdValue, placement: Placement) -> TwoWays:
        """An output to rank 0, and its gradient from there."""
        times, size = self._times, value.size_bytes
        forward, back = AlphaBeta(), AlphaBeta()
        if placement.is_shard:
            forward = back = times.root
        elif placement.kind is _P:
            forward, back = times.reduce, times.broadcast
        elif placement.kind is _SAME:
            back = times.broadcast
        return self._both(value, forward.seconds(size), back.seconds(size))

    def _both(self, value: SpmdValue, forward_s: float, back_s: float) -> TwoWays:
        """A way between rank 0 and all, and the gradient's way back where there is one."""
        if self._num_devices == 1:
            return (), ()
        return (self._flat(forward_s),), (self._flat(back_s),) if self._flows(value) else ()
