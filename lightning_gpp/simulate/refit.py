"""What recorded steps say about costs: corrected profiles, and the costs outside of operators.

A profile measures operators one by one on an idle machine; a stage runs them together while other
devices are busy. So the operators of every stage are scaled until the stage takes what was
recorded, forward and backward apart and for every kind of device. What the profile does not see
(data, the user's step, messages, the optimizer) is read off the timeline.

This is the loop of planning, running and planning again of DistIR (Santhanam et al., EuroMLSys
2021) and others: the next plan is made with the corrected costs.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_gpp.cluster import Cluster
from lightning_gpp.common.data_file import read_data_file
from lightning_gpp.common.strict_json import JsonFormat
from lightning_gpp.common.units_of_measure import count_text, seconds_text
from lightning_gpp.cost import Costs, OpProfile, Profile, load_costs
from lightning_gpp.planner import Plan, PlanRequest
from lightning_gpp.simulate.program_costs import StepCosts
from lightning_gpp.simulate.slow_devices import SlowDevice, with_slow

FORMAT = JsonFormat("lightning_gpp.refit", 6, older=(5,))


@dataclass(frozen=True, slots=True)
class StageRecord:
    """Recorded times of a stage on devices of one kind.

    Attributes:
        stage: its id in the plan.
        kind: of the devices.
        operators: what it runs.
        samples: of a replica's share of a micro-batch.
        recompute: whether the backward runs the forward again.
        forward_s: recorded seconds of a forward, without the user's step.
        backward_s: recorded seconds of a backward.
    """

    stage: int
    kind: str
    operators: tuple[str, ...]
    samples: float
    recompute: bool
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Refit:
    """What recorded steps say about costs.

    Attributes:
        steps: the recorded steps, by the optimizer steps done before them.
        step_s: their median seconds.
        stages: what the stages took.
        besides: what a step costs besides, whatever its plan.
        optimizer_s: of every device of the plan the seconds of the optimizer; None: it had none.
        finish_s: of every device the seconds from the end of the actions to the optimizer.
        slow: devices that were slower than others of their kind; ``stages`` are without that.
    """

    steps: tuple[int, ...]
    step_s: float
    stages: tuple[StageRecord, ...]
    besides: StepCosts
    optimizer_s: tuple[float | None, ...] = ()
    finish_s: tuple[float | None, ...] = ()
    slow: tuple[SlowDevice, ...] = ()

    def describe(self) -> str:
        """Describes the recorded steps that it comes from."""
        kinds = ", ".join(dict.fromkeys(stage.kind for stage in self.stages))
        steps = count_text(max(1, len(self.steps)), "step")
        text = f"refitted to {steps} recorded on {kinds} ({seconds_text(self.step_s)} per step)"
        return "; ".join((text, *(each.describe() for each in self.slow)))

    def request(self, request: PlanRequest, ranks: Sequence[int] | None = None) -> PlanRequest:
        """The question with corrected costs, in which devices that were slow are so.

        Args:
            request: the question.
            ranks: of its devices; by default as planners are asked
                (:func:`~lightning_gpp.planner.plan.by_rank.in_plan_order`).

        Raises:
            ValueError: the refit is of another model.
        """
        count = request.num_devices
        ranks = [*range(1, count), 0] if ranks is None else ranks
        cluster = with_slow(request.cluster, (), ranks)
        costs = corrected_costs(self.stages, request.costs, cluster)
        slow = [each for each in self.slow if each.rank < count]
        own = {each.own_kind: each for each in slow if each.kind in cluster.kinds}
        kept = tuple(profile for profile in costs.profiles if profile.device not in own)
        slowed = tuple(
            replace(profile.slower(each.times), device=each.own_kind)
            for each in own.values()
            for profile in costs.by_kind[costs.kind_for(each.kind)]
        )
        costs = Costs(kept + slowed)
        return replace(request, cluster=with_slow(cluster, slow, ranks), costs=costs)

    def step_costs(self, plan: Plan) -> StepCosts:
        """Costs of a step outside of the program, also for other plans than the recorded one.

        Devices of which nothing is known take the mean of those that were recorded.
        """
        return replace(
            self.besides,
            optimizer_s=_on_devices(plan.num_devices, self.optimizer_s),
            finish_s=_on_devices(plan.num_devices, self.finish_s),
        )


def _on_devices(num_devices: int, recorded_s: Sequence[float | None]) -> dict[int, float]:
    """Device -> recorded seconds, or their mean; without those that had none."""
    known = [seconds for seconds in recorded_s if seconds is not None]
    unknown = [statistics.fmean(known) if known else None] * (num_devices - len(recorded_s))
    each = enumerate([*recorded_s[:num_devices], *unknown])
    return {device: seconds for device, seconds in each if seconds is not None}


def corrected_costs(records: Sequence[StageRecord], costs: Costs, cluster: Cluster) -> Costs:
    """Costs with the operators of recorded stages scaled until the stages take what was recorded.

    A stage, or a kind of device, of which nothing was recorded keeps its profile; so do operators
    that take no time by the profile beside others that do.

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
    by_kind = dict(costs.by_kind)
    for kind in cluster.kinds:
        profiles = costs.by_kind[costs.kind_for(kind)]
        for record in records:
            if record.kind == kind:
                profiles = _corrected(record, profiles)
                by_kind[kind] = profiles
    return Costs(tuple(profile for profiles in by_kind.values() for profile in profiles))


def _corrected(record: StageRecord, profiles: Sequence[Profile]) -> tuple[Profile, ...]:
    """Profiles of all sizes, for the kind of a record, with the operators of its stage scaled."""
    at = Costs(tuple(profiles)).at(record.samples, profiles[0].device)
    operators = [at.operators[name] for name in record.operators]
    backward_s = record.backward_s - (record.forward_s if record.recompute else 0.0)
    forwards_s = sum(operator.forward_s for operator in operators)
    backwards_s = sum(operator.backward_s for operator in operators)

    def scaled(seconds: float, recorded_s: float, profile_s: float, size: float) -> float:
        if profile_s > 0:
            return seconds * max(0.0, recorded_s) / profile_s
        # Only a single size is extrapolated in proportion.
        ratio = size / record.samples if len(profiles) == 1 else 1.0
        return seconds + max(0.0, recorded_s) / max(1, len(operators)) * ratio

    def corrected(one: OpProfile, size: float) -> OpProfile:
        return replace(
            one,
            forward_s=scaled(one.forward_s, record.forward_s, forwards_s, size),
            backward_s=scaled(one.backward_s, backward_s, backwards_s, size),
        )

    return tuple(
        replace(
            profile,
            device=record.kind,
            operators={
                name: corrected(one, profile.microbatch_size) if name in record.operators else one
                for name, one in profile.operators.items()
            },
        )
        for profile in profiles
    )


def load_costs_or_refit(path: str | Path) -> Costs | Refit:
    """Reads a JSON or YAML file that holds either.

    Raises:
        ValueError: it does not.
        FileNotFoundError: there is no such file.
    """
    data = read_data_file(path)
    if isinstance(data, Mapping) and data.get("format") == FORMAT.name:
        return FORMAT.from_data(Refit, data, source=str(path))
    return load_costs(path)
