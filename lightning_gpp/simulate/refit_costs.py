"""Costs with the operators of recorded stages scaled until the stages take what was recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_gpp.cluster import Cluster
from lightning_gpp.cost import Costs, OpProfile, Profile
from lightning_gpp.simulate.refit_records import StageRecord


def corrected_costs(records: Sequence[StageRecord], costs: Costs, cluster: Cluster) -> Costs:
    """Costs with the operators of recorded stages scaled.

    A stage, or a kind of device, of which nothing was recorded keeps its profile.

    Args:
        records: of the stages.
        costs: those that the recorded plan was made from.
        cluster: whose kinds of devices they are for.

    Raises:
        ValueError: the records are of another model.
    """
    known = costs.profiles[0].operators
    missing = [name for record in records for name in record.operators if name not in known]
    if missing:
        raise ValueError(
            f"the refit is of another model: the costs know nothing of {', '.join(missing[:3])}"
        )
    corrected: dict[str, tuple[Profile, ...]] = {}
    for kind in cluster.kinds:
        own = [record for record in records if record.kind == kind]
        profiles = costs.by_kind[costs.kind_for(kind)]
        if own:
            factors = {n: f for record in own for n, f in _factors(record, profiles).items()}
            corrected[kind] = tuple(_corrected(profile, factors, kind) for profile in profiles)
    kept = [p for name, found in costs.by_kind.items() if name not in corrected for p in found]
    return Costs((*kept, *(p for found in corrected.values() for p in found)))


@dataclass(frozen=True, slots=True)
class _Factor:
    """``scale * seconds + more`` of a forward or a backward."""

    scale: float = 1.0
    more_s: float = 0.0

    def of(self, seconds: float, size_ratio: float) -> float:
        return self.scale * seconds + self.more_s * size_ratio

    @classmethod
    def to(cls, recorded_s: float, profile_s: float, count: int) -> _Factor:
        """From what the costs say of a stage to what was recorded."""
        if profile_s > 0:
            return cls(max(0.0, recorded_s) / profile_s)
        return cls(1.0, max(0.0, recorded_s) / count)


def _factors(
    record: StageRecord, profiles: Sequence[Profile]
) -> dict[str, tuple[_Factor, _Factor, float]]:
    """Operator -> factors of its forward and backward, and the samples they were recorded with."""
    count = max(1, len(record.operators))
    again_s = record.forward_s if record.recompute else 0.0
    profile_again_s = record.profile_forward_s if record.recompute else 0.0
    forward = _Factor.to(record.forward_s, record.profile_forward_s, count)
    backward = _Factor.to(
        record.backward_s - again_s, record.profile_backward_s - profile_again_s, count
    )
    # A single profiled size is extrapolated in proportion, several by a line with an offset.
    samples = record.samples if len(profiles) == 1 else 0.0
    return dict.fromkeys(record.operators, (forward, backward, samples))


def _corrected(
    profile: Profile, factors: Mapping[str, tuple[_Factor, _Factor, float]], kind: str
) -> Profile:
    size = profile.microbatch_size
    operators: dict[str, OpProfile] = {}
    for name, operator in profile.operators.items():
        if name in factors:
            forward, backward, samples = factors[name]
            ratio = size / samples if samples else 1.0
            operator = replace(
                operator,
                forward_s=forward.of(operator.forward_s, ratio),
                backward_s=backward.of(operator.backward_s, ratio),
            )
        operators[name] = operator
    return Profile(operators, size, kind, profile.is_estimated)
