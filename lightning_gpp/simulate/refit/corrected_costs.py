"""Costs with the operators of recorded stages scaled until the stages take what was recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_gpp.cluster import Cluster
from lightning_gpp.cost import Costs, OpProfile, Profile
from lightning_gpp.simulate.refit.records import StageRecord


def corrected_costs(records: Sequence[StageRecord], costs: Costs, cluster: Cluster) -> Costs:
    """Costs with the operators of recorded stages scaled.

    A stage, or a kind of device, of which nothing was recorded keeps its profile.

    Args:
        records: of the stages.
        costs: of the same model, whatever the recorded plan was made from.
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
            at = Costs(profiles).at
            factors = {
                name: found
                for record in own
                for name, found in _factors(record, at(record.samples, profiles[0].device)).items()
            }
            if len(profiles) > 1:  # only a single size is extrapolated in proportion
                factors = {name: replace(found, samples=0.0) for name, found in factors.items()}
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


@dataclass(frozen=True, slots=True)
class _Factors:
    """How an operator is corrected.

    Attributes:
        forward: its forward.
        backward: its backward.
        samples: with which it was recorded; 0 where what is added holds for any number.
    """

    forward: _Factor
    backward: _Factor
    samples: float

    def of(self, operator: OpProfile, size: float) -> OpProfile:
        """The operator for a micro-batch of so many samples."""
        ratio = size / self.samples if self.samples else 1.0
        return replace(
            operator,
            forward_s=self.forward.of(operator.forward_s, ratio),
            backward_s=self.backward.of(operator.backward_s, ratio),
        )


def _factors(record: StageRecord, profile: Profile) -> dict[str, _Factors]:
    """Operator of a stage -> its factors; the profile is for as many samples as were recorded."""
    operators = [profile.operators[name] for name in record.operators]
    again_s = record.forward_s if record.recompute else 0.0
    count = max(1, len(operators))
    forward = _Factor.to(record.forward_s, sum(o.forward_s for o in operators), count)
    backward = _Factor.to(record.backward_s - again_s, sum(o.backward_s for o in operators), count)
    return dict.fromkeys(record.operators, _Factors(forward, backward, record.samples))


def _corrected(profile: Profile, factors: Mapping[str, _Factors], kind: str) -> Profile:
    size = profile.microbatch_size
    operators = {
        name: factors[name].of(operator, size) if name in factors else operator
        for name, operator in profile.operators.items()
    }
    return Profile(operators, size, kind, profile.is_estimated)
