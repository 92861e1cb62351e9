"""Costs with the operators of recorded stages scaled until the stages take what was recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_gpp.cluster import Cluster
from lightning_gpp.cost import Costs, OpProfile, Profile
from lightning_gpp.simulate.refit.records import StageRecord

Line = tuple[float, float]
"""``scale`` and ``more_s`` of ``scale * seconds + more_s``."""

Correction = tuple[Line, Line, float]
"""Of the forward and the backward of an operator; the samples of a micro-batch that ``more_s`` is
for, 0 where it holds for any number."""


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
    corrected: dict[str, list[Profile]] = {}
    for kind in cluster.kinds:
        profiles = costs.by_kind[costs.kind_for(kind)]
        found: dict[str, Correction] = {}
        for record in records:
            if record.kind == kind:
                profile = Costs(profiles).at(record.samples, profiles[0].device)
                # Only a single size is extrapolated in proportion.
                samples = record.samples if len(profiles) == 1 else 0.0
                found |= dict.fromkeys(record.operators, _correction(record, profile, samples))
        if found:
            corrected[kind] = [_corrected(profile, found, kind) for profile in profiles]
    kept = [p for name, found in costs.by_kind.items() if name not in corrected for p in found]
    return Costs((*kept, *(profile for found in corrected.values() for profile in found)))


def _correction(record: StageRecord, profile: Profile, samples: float) -> Correction:
    """From what the costs say of a stage to what was recorded."""
    operators = [profile.operators[name] for name in record.operators]

    def line(recorded_s: float, profile_s: float) -> Line:
        if profile_s > 0:
            return max(0.0, recorded_s) / profile_s, 0.0
        return 1.0, max(0.0, recorded_s) / max(1, len(operators))

    backward_s = record.backward_s - (record.forward_s if record.recompute else 0.0)
    forward = line(record.forward_s, sum(operator.forward_s for operator in operators))
    return forward, line(backward_s, sum(o.backward_s for o in operators)), samples


def _corrected(profile: Profile, found: Mapping[str, Correction], kind: str) -> Profile:
    def correct(operator: OpProfile, correction: Correction) -> OpProfile:
        (scale, more_s), (back_scale, back_more_s), samples = correction
        ratio = profile.microbatch_size / samples if samples else 1.0
        return replace(
            operator,
            forward_s=scale * operator.forward_s + more_s * ratio,
            backward_s=back_scale * operator.backward_s + back_more_s * ratio,
        )

    operators = {
        name: correct(operator, found[name]) if name in found else operator
        for name, operator in profile.operators.items()
    }
    return Profile(operators, profile.microbatch_size, kind, profile.is_estimated)
