"""What Piper's stages take: time per sample and memory of differences of two downsets.

For a stage of operators ``v`` on ``d`` data-parallel copies of ``t`` devices each (Piper, NeurIPS
2021, section 3; github msr-fiddle/piper)::

    seconds = sum of p_v / d
            + ( sum over edges to and from other stages of 2 (c + sync) / d
              + sum of 4 (d - 1) w_v / (d N) ) / bandwidth
    memory  = sum of a_v y + b_v,   y = ceil(s / d)

where ``s`` is the sum of ``d`` over this and all later stages. If the fastest ways to run the
operators take too much memory, others are chosen by a greedy knapsack: those that cost the least
time per byte saved come first (the published fast heuristic, which needs at most two ways).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_gpp.workloads import PiperInstance, PiperOperator, Tmpc

Array = NDArray[np.float64]
ENOUGH_BYTES = 1e-9
MAX_WAYS = 2


@dataclass(frozen=True)
class DegreeCosts:
    """The operators at one tensor-parallel degree, as arrays in the order of the instance.

    Attributes:
        degree: devices of one copy.
        missing: 1 where an operator cannot run at that degree.
        fast_s: seconds per sample the fastest way.
        slower_s: how much longer the other way takes; 0 where there is none.
        parameter_bytes: weights.
        fast_bytes: memory of the fastest way, per sample in flight and fixed.
        small_bytes: of the other way.
        into_bytes: ``[u, v]`` bytes that ``v`` receives when ``u`` is in another stage.
        out_bytes: ``[u, v]`` bytes that ``u`` sends likewise.
    """

    degree: int
    missing: Array
    fast_s: Array
    slower_s: Array
    parameter_bytes: Array
    fast_bytes: tuple[Array, Array]
    small_bytes: tuple[Array, Array]
    into_bytes: Array
    out_bytes: Array


def degree_costs(instance: PiperInstance, degree: int) -> DegreeCosts:
    """Arrays of an instance for one tensor-parallel degree.

    Raises:
        ValueError: an operator has more than two ways, or ways that communicate differently.
    """
    ways = [_ordered_ways(operator, degree) for operator in instance.operators]
    place = {operator.id: i for i, operator in enumerate(instance.operators)}
    into = np.zeros((len(ways), len(ways)))
    out = np.zeros_like(into)
    for edge in instance.edges:
        u, v = place[edge.source], place[edge.target]
        into[u, v] = edge.size_bytes + ways[v][0].sync_forward_bytes.get(edge.source, 0.0)
        out[u, v] = edge.size_bytes + ways[u][0].sync_backward_bytes.get(edge.target, 0.0)

    def column(name: str, way: int) -> Array:
        return np.array([getattr(found[way], name) for found in ways], dtype=float)

    fast_s = column("seconds_per_sample", 0)
    return DegreeCosts(
        degree=degree,
        missing=np.array([not o.ways.get(degree) for o in instance.operators], dtype=float),
        fast_s=fast_s,
        slower_s=column("seconds_per_sample", -1) - fast_s,
        parameter_bytes=column("parameter_bytes", 0),
        fast_bytes=(column("memory_bytes_in_flight", 0), column("memory_bytes_fixed", 0)),
        small_bytes=(column("memory_bytes_in_flight", -1), column("memory_bytes_fixed", -1)),
        into_bytes=into,
        out_bytes=out,
    )


_NO_WAY = Tmpc("none", 0.0, 0.0, 0.0, 0.0, {}, {})


def _ordered_ways(operator: PiperOperator, degree: int) -> tuple[Tmpc, ...]:
    ways = sorted(operator.ways.get(degree, ()), key=lambda way: way.seconds_per_sample)
    if len(ways) > MAX_WAYS:
        raise ValueError(
            f"operator {operator.name!r} has {len(ways)} ways to run on {degree} devices; Piper's "
            f"knapsack needs at most {MAX_WAYS}"
        )
    for way in ways:
        if _communication(way) != _communication(ways[0]):
            raise ValueError(
                f"operator {operator.name!r}: ways to run on {degree} devices must have the same "
                "parameterSize, syncTimeFw and syncTimeBw"
            )
    return tuple(ways) or (_NO_WAY,)


def _communication(way: Tmpc) -> Any:
    return way.parameter_bytes, way.sync_forward_bytes, way.sync_backward_bytes


@dataclass
class DownsetCosts:
    """Time and memory of the stages between downsets.

    Attributes:
        instance: the problem.
        members: ``[downset, operator]``, 1 where the operator is in it.
        costs: the operators at one tensor-parallel degree.
        max_in_flight: largest ``y`` to be asked for.
        whole_stages: recompute all operators of a stage or none, not one by one.
        single: operators that neither recompute nor have copies, 1 each.
    """

    instance: PiperInstance
    members: Array
    costs: DegreeCosts
    max_in_flight: int
    whole_stages: bool = False
    single: Array | None = None
    _sums: dict[str, Array] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        costs, members = self.costs, self.members
        in_flight = np.arange(self.max_in_flight + 1)
        small = np.minimum(
            _usage(costs.fast_bytes, in_flight), _usage(costs.small_bytes, in_flight)
        )
        single = np.zeros(members.shape[1]) if self.single is None else self.single
        self._sums = {
            "missing": members @ costs.missing,
            "single": members @ single,
            "fast_s": members @ costs.fast_s,
            "slower_s": members @ costs.slower_s,
            "weights": members @ costs.parameter_bytes,
            "fast_bytes": members @ _usage(costs.fast_bytes, in_flight),
            "small_bytes": members @ small,
            "out": (((1 - members) @ costs.out_bytes) * members).sum(axis=1),
        }

    def seconds(self, downset: int, subs: NDArray[np.intp], copies: int) -> Array:
        """Seconds per sample of the stages ``downset - sub``: ``[sub, y]``, y from 0."""
        d = copies
        compute_s = self._compute_s(downset, subs)
        weights = self._between("weights", downset, subs)
        sync_bytes = 4 * (d - 1) * weights / d / self.instance.num_samples
        bytes_sent = self._cut_bytes(downset, subs) / d + sync_bytes
        result = compute_s / d + (bytes_sent / self.instance.bandwidth_bytes_per_s)[:, None]
        if d > 1:
            result[self._between("single", downset, subs) > 0] = np.inf
        return result

    def _between(self, name: str, downset: int, subs: NDArray[np.intp]) -> Array:
        sums = self._sums[name]
        return np.asarray(sums[downset] - sums[subs])

    def _cut_bytes(self, downset: int, subs: NDArray[np.intp]) -> Array:
        """Bytes of forward and backward over the edges of the stages, both ends' costs."""
        inside = self.members[downset]
        into = (1 - inside) @ self.costs.into_bytes
        over = into + (1 - inside) @ self.costs.out_bytes  # from before the stage to behind it
        cut = inside @ into + self._sums["out"][subs] - self.members[subs] @ over
        return np.asarray(2 * cut)

    def _compute_s(self, downset: int, subs: NDArray[np.intp]) -> Array:
        """Seconds of compute with ways that fit into memory, infinite where none do."""
        memory_bytes = self.instance.memory_bytes
        fast_s = self._between("fast_s", downset, subs)
        result = np.repeat(fast_s[:, None], self.max_in_flight + 1, axis=1)
        excess = self._between("fast_bytes", downset, subs) - memory_bytes
        never = self._between("small_bytes", downset, subs) > memory_bytes
        if self.whole_stages:
            never |= (excess > 0) & (self._between("single", downset, subs) > 0)[:, None]
        result[never] = np.inf
        result[self._between("missing", downset, subs) > 0] = np.inf
        tight = (excess > 0) & np.isfinite(result)
        for in_flight in map(int, np.flatnonzero(tight.any(axis=0))):
            rows = np.flatnonzero(tight[:, in_flight])
            result[rows, in_flight] += self._longer_s(
                downset, subs[rows], in_flight, excess[rows, in_flight]
            )
        return result

    def _longer_s(
        self, downset: int, subs: NDArray[np.intp], in_flight: int, excess: Array
    ) -> Array:
        """Seconds that saving the excess bytes costs."""
        if self.whole_stages:
            return self._between("slower_s", downset, subs)
        order, saved = self._by_price(in_flight)
        inside = self.members[downset][order] - self.members[subs][:, order]
        enough = np.cumsum(inside * saved, axis=1) > excess[:, None] - ENOUGH_BYTES
        last = enough.argmax(axis=1)
        paid = np.cumsum(inside * self.costs.slower_s[order], axis=1)
        return np.asarray(paid[np.arange(len(subs)), last])

    def _by_price(self, in_flight: int) -> tuple[NDArray[np.intp], Array]:
        """Operators whose other way saves memory, cheapest per byte first, and these bytes."""
        at = np.array([in_flight])
        saved = (_usage(self.costs.fast_bytes, at) - _usage(self.costs.small_bytes, at))[:, 0]
        useful = np.flatnonzero(saved > ENOUGH_BYTES)
        price = self.costs.slower_s[useful] / saved[useful]
        order = useful[np.argsort(price, kind="stable")]
        return order, saved[order]

    def ways(self, downset: int, sub: int, in_flight: int) -> list[int]:
        """Position of the way of every operator of a stage: 0 the fastest, 1 the other one."""
        inside = self.members[downset] - self.members[sub]
        excess = self._between("fast_bytes", downset, np.array([sub]))[0, in_flight]
        excess -= self.instance.memory_bytes
        chosen = np.zeros(len(inside), dtype=int)
        order, saved = self._by_price(in_flight)
        for operator, bytes_saved in zip(order, saved):
            if inside[operator] and (excess > ENOUGH_BYTES or (self.whole_stages and chosen.any())):
                chosen[operator] = 1
                excess -= bytes_saved
        return [int(chosen[operator]) for operator in np.flatnonzero(inside)]


def _usage(bytes_: tuple[Array, Array], in_flight: Sequence[int] | NDArray[np.int_]) -> Array:
    per_sample, fixed = bytes_
    return np.asarray(per_sample[:, None] * np.asarray(in_flight) + fixed[:, None])
