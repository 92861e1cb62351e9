"""What recorded steps say about costs: corrected profiles, and what a step costs besides.

A profile measures operators one by one on an idle machine; a stage runs them together while other
devices are busy. So the operators of every stage are scaled until the stage takes what was
recorded, forward and backward apart and for every kind of device. What the profile does not see
(data, the user's step, messages, the interpreter, the optimizer) is read off the timeline.

This is the loop of planning, running and planning again of DistIR (Santhanam et al., EuroMLSys
2021) and others: the next plan is made with the corrected costs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lightning_gpp.cluster import Cluster, Link
from lightning_gpp.common.data_file import read_data_file
from lightning_gpp.common.strict_json import JsonFormat
from lightning_gpp.common.units_of_measure import count_text, seconds_text
from lightning_gpp.cost import Costs, OpProfile, Profile
from lightning_gpp.planner import Plan, PlanRequest
from lightning_gpp.simulate.program_costs import Overhead, StepCosts

FORMAT = JsonFormat("lightning_gpp.refit", 4)

AS_RECORDED = (
    *("data_s", "prepare_s", "feed_s", "feed_backward_s", "loss_s", "loss_backward_s", "turn_s"),
    *("send", "receive", "reduce", "action_s"),
)
"""What a step costs whatever its plan."""


@dataclass(frozen=True, slots=True)
class StageRecord:
    """What a stage took on devices of one kind.

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


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """What a device did once per step.

    Attributes:
        device: its index in the plan.
        optimizer_s: seconds of the optimizer; None where it had none.
        finish_s: seconds from the end of the actions to the optimizer; None likewise.
    """

    device: int
    optimizer_s: float | None = None
    finish_s: float | None = None


@dataclass(frozen=True)
class Refit:
    """What recorded steps say about costs.

    Attributes:
        steps: the recorded steps, by the optimizer steps done before them; what they took on
            average is that of the half of them that took about the median.
        step_s: their median seconds.
        schedule: name of the schedule.
        num_microbatches: smallest micro-batches of the mini-batch.
        minibatch_size: samples of the mini-batch.
        stages: what the stages took.
        devices: what the devices did once per step.
        data_s: as in :class:`~lightning_gpp.simulate.StepCosts`; so are those that follow.
        prepare_s: seconds.
        feed_s: seconds per micro-batch of the stage of the loss.
        feed_backward_s: seconds.
        loss_s: seconds per micro-batch of the stage of the loss.
        loss_backward_s: seconds; 0 where that stage has operators, from whose backward the
            loss's own cannot be told.
        turn_s: seconds of the user's step where it runs once; 0 where it ran for every micro-batch.
        action_s: seconds between two actions.
        send: seconds per message and byte.
        receive: likewise.
        reduce: per sum of a group's gradients.
        links: level (``"host"``, ``"rack"``, ``"spine"``) -> the link that messages took.
    """

    steps: tuple[int, ...]
    step_s: float
    schedule: str
    num_microbatches: int
    minibatch_size: int
    stages: tuple[StageRecord, ...]
    devices: tuple[DeviceRecord, ...]
    data_s: float = 0.0
    prepare_s: float = 0.0
    feed_s: float = 0.0
    feed_backward_s: float = 0.0
    loss_s: float = 0.0
    loss_backward_s: float = 0.0
    turn_s: float = 0.0
    action_s: float = 0.0
    send: Overhead = field(default_factory=Overhead)
    receive: Overhead = field(default_factory=Overhead)
    reduce: Overhead = field(default_factory=Overhead)
    links: Mapping[str, Link] = field(default_factory=dict)

    def describe(self) -> str:
        """What it was read off, in words."""
        kinds = ", ".join(dict.fromkeys(stage.kind for stage in self.stages))
        steps = count_text(max(1, len(self.steps)), "step")
        return f"refitted to {steps} recorded on {kinds} ({seconds_text(self.step_s)} per step)"

    def to_json(self) -> str:
        """The versioned JSON form; seconds and bytes."""
        return FORMAT.dumps(self)

    @classmethod
    def from_json(cls, text: str, *, source: str = "refit") -> Refit:
        """Reads :meth:`to_json`'s form.

        Raises:
            ValueError: it is not a refit; the text names the place.
        """
        return FORMAT.loads(cls, text, source=source)

    def request(self, request: PlanRequest) -> PlanRequest:
        """The question with corrected costs and links.

        Raises:
            ValueError: the refit is of another model.
        """
        costs = corrected_costs(self.stages, request.costs, request.cluster)
        return replace(request, costs=costs, cluster=self.cluster(request.cluster))

    def cluster(self, cluster: Cluster) -> Cluster:
        """The cluster with the links that messages took."""
        host, rack, spine = (self.links.get(name) for name in ("host", "rack", "spine"))
        return replace(
            cluster,
            host_link=host or cluster.host_link,
            rack_link=rack or cluster.rack_link or (cluster.host_link if host else None),
            spine_link=spine
            or cluster.spine_link
            or ((cluster.rack_link or cluster.host_link) if rack or host else None),
        )

    def step_costs(self, plan: Plan, base: StepCosts | None = None) -> StepCosts:
        """What a step of a plan costs besides, also of a plan other than the recorded one.

        Devices of which nothing is known take the mean of those that were recorded.

        Args:
            plan: the plan.
            base: for what timelines do not show (the copy of the input to the device).
        """
        return replace(
            base or StepCosts(),
            **{name: getattr(self, name) for name in AS_RECORDED},
            optimizer_s=self._on_devices(plan, lambda device: device.optimizer_s),
            finish_s=self._on_devices(plan, lambda device: device.finish_s),
        )

    def _on_devices(
        self, plan: Plan, value: Callable[[DeviceRecord], float | None]
    ) -> dict[int, float]:
        """Device -> recorded seconds, or their mean; without those that had none."""
        seconds = {one.device: value(one) for one in self.devices}
        known = [found for found in seconds.values() if found is not None]
        mean_s = statistics.fmean(known) if known else None
        each = {device: seconds.get(device, mean_s) for device in range(plan.num_devices)}
        return {device: found for device, found in each.items() if found is not None}


def corrected_costs(records: Sequence[StageRecord], costs: Costs, cluster: Cluster) -> Costs:
    """Costs with the operators of recorded stages scaled until the stages take what was recorded.

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
                found |= dict.fromkeys(record.operators, _correction(record, profiles))
        if found:
            corrected[kind] = [_corrected(profile, found, kind) for profile in profiles]
    kept = [p for name, own in costs.by_kind.items() if name not in corrected for p in own]
    return Costs((*kept, *(profile for own in corrected.values() for profile in own)))


Correction = Callable[[OpProfile, float], OpProfile]
"""An operator for micro-batches of so many samples, as recorded."""


def _correction(record: StageRecord, profiles: Sequence[Profile]) -> Correction:
    """From what the costs say of the operators of a stage to what was recorded."""
    at = Costs(tuple(profiles)).at(record.samples, profiles[0].device)
    operators = [at.operators[name] for name in record.operators]
    backward_s = record.backward_s - (record.forward_s if record.recompute else 0.0)

    def scaled(seconds: float, recorded_s: float, profile_s: float, size: float) -> float:
        if profile_s > 0:
            return seconds * max(0.0, recorded_s) / profile_s
        # Only a single size is extrapolated in proportion.
        ratio = size / record.samples if len(profiles) == 1 else 1.0
        return seconds + max(0.0, recorded_s) / max(1, len(operators)) * ratio

    forwards_s = sum(operator.forward_s for operator in operators)
    backwards_s = sum(operator.backward_s for operator in operators)
    return lambda one, size: replace(
        one,
        forward_s=scaled(one.forward_s, record.forward_s, forwards_s, size),
        backward_s=scaled(one.backward_s, backward_s, backwards_s, size),
    )


def _corrected(profile: Profile, found: Mapping[str, Correction], kind: str) -> Profile:
    size = profile.microbatch_size
    operators = {
        name: found[name](operator, size) if name in found else operator
        for name, operator in profile.operators.items()
    }
    return Profile(operators, size, kind, profile.is_estimated)


def is_refit_file(path: str | Path) -> bool:
    """Whether a JSON or YAML file says that it holds a refit.

    Raises:
        ValueError: it is neither.
        FileNotFoundError: there is no such file.
    """
    data = read_data_file(path)
    return isinstance(data, Mapping) and data.get("format") == FORMAT.name


def load_refit(path: str | Path) -> Refit:
    """Reads a file that holds a refit.

    Raises:
        ValueError: it does not.
        FileNotFoundError: there is no such file.
    """
    return FORMAT.from_data(Refit, read_data_file(path), source=str(path))
