"""The input and output of every planner.

A planner is a pure function from a :class:`PlanRequest` to a plan: no clock, no random number, no
global. It lives in a file of its own and is listed by name in
:data:`lightning_gpp.planner.make_plan.PLANNERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from lightning_gpp.cluster import Cluster
from lightning_gpp.common.checks import check_whole, short_list
from lightning_gpp.common.units_of_measure import bytes_text
from lightning_gpp.cost import Costs, Profile
from lightning_gpp.graph import ModelGraph
from lightning_gpp.planner.plan.plan import Plan
from lightning_gpp.planner.request_tables import RequestTables
from lightning_gpp.schedule import GPIPE, ONE_F_ONE_B, ONE_F_ONE_B_ASYNC, find_schedule
from lightning_gpp.schedule.schedules import Schedule

ADAM_VALUES = 2
"""Values per parameter that Adam keeps; the default assumption on the optimizer."""

FEW_MICROBATCHES = 4
"""A mini-batch can be cut into so few whole micro-batches of a power of two, or is cut unevenly."""


MOST_MICROBATCHES = 2**20
"""Steps of more micro-batches than these are not planned: a plan is judged by playing its step."""


IN_A_ROW = 64
"""Mini-batches by which a plan is judged where the pipeline does not drain between them: filling
and draining it then count little beside the busiest stage, as in training without end."""


class HeldVersions(NamedTuple):
    """How many copies of its parameters a stage holds, the newest included.

    Attributes:
        least: at least so many.
        most: as many as are met by the mini-batches in flight, but at most these; None does not
            limit them.
        keeps_predictions: whether every mini-batch in flight before whose backward there is an
            update keeps a prediction of its own, beside the newest and the one before, from which
            Adam's last step is known.
        per_update: mini-batches whose gradients are accumulated for one update.
    """

    least: int = 1
    most: int | None = 1
    keeps_predictions: bool = False
    per_update: int = 1

    def of(self, in_flight: int) -> int:
        """Number of copies with a number of mini-batches in flight.

        >>> stash, kept = HeldVersions(1, None), HeldVersions(1, None, keeps_predictions=True)
        >>> HeldVersions(1, 2).of(4), stash.of(4), kept.of(4)
        (2, 4, 6)
        >>> stash._replace(per_update=2).of(4), kept._replace(per_update=4).of(4)
        (3, 5)
        """
        ahead = in_flight - 1
        if self.keeps_predictions:
            kept = in_flight if self.per_update <= ahead else ahead
            return kept + 2 if ahead else 1
        met = 1 + -(-ahead // self.per_update)
        return max(self.least, min(met, self.most or met))


ONE_VERSION = HeldVersions()
"""Where the pipeline drains."""


@dataclass(frozen=True)
class PlanRequest:
    """The question to a planner.

    Attributes:
        graph: the model.
        cluster: the devices to use, and their links.
        costs: what the operators cost, measured or estimated, by micro-batch size and device kind.
        minibatch_size: samples of one optimizer step.
        num_microbatches: micro-batches of a mini-batch where the user fixed their number, which
            gives all stages one micro-batch size; None leaves the sizes to the planner.
        schedule: name of the schedule that will run the plan.
        optimizer_values: values that the optimizer keeps per trained parameter.
        may_recompute: whether stages may run their forward again instead of keeping activations.
        max_replicas: most data-parallel replicas of a stage; 1 plans pipelines alone, None does
            not limit them.
        held_versions: of the parameters, where the pipeline does not drain.
        sums_share: the part of their time that sums of gradients are taken to need; less than 1 in
            a search for the way past them.
        inputs_ahead: whether the inputs of a step are sent during the step before, where the user's
            step runs on whole mini-batches.

    Raises:
        ValueError: the model has no operator, a number makes no sense, the schedule is unknown, or
            the costs lack an operator or a kind of device.
    """

    graph: ModelGraph
    cluster: Cluster
    costs: Costs
    minibatch_size: int
    num_microbatches: int | None = None
    schedule: str = "1f1b"
    optimizer_values: int = ADAM_VALUES
    may_recompute: bool = False
    max_replicas: int | None = None
    held_versions: HeldVersions = ONE_VERSION
    sums_share: float = 1.0
    inputs_ahead: bool = False

    def __post_init__(self) -> None:
        if not self.graph.operators:
            raise ValueError("the model has no operator, so there is nothing to plan")
        check_whole("minibatch_size", self.minibatch_size)
        check_whole("optimizer_values", self.optimizer_values, least=0)
        for name in ("num_microbatches", "max_replicas"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name))
        most = min(self.minibatch_size, MOST_MICROBATCHES)
        if self.num_microbatches is not None and self.num_microbatches > most:
            raise ValueError(
                f"num_microbatches can be at most {most} for {self.minibatch_size} samples, got "
                f"{self.num_microbatches}"
            )
        if (self.num_minibatches > 1 or self.order.reverses) and self.max_replicas != 1:
            raise ValueError(
                f"the schedule {self.schedule!r} has no replicas: max_replicas has to be 1, got "
                f"{self.max_replicas}"
            )
        for kind in self.cluster.kinds:
            self.costs.kind_for(kind)
        known = self.costs.profiles[0].operators
        if missing := [o.name for o in self.graph if o.name not in known]:
            raise ValueError(
                f"the profile has no costs of {short_list(missing)}; it must have been measured on "
                "this model graph: profile again"
            )

    @property
    def num_devices(self) -> int:
        """Number of devices to use."""
        return self.cluster.num_devices

    @property
    def holds_all(self) -> bool:
        """Whether stages hold the activations of all micro-batches at their peak."""
        return self.order.forwards_first

    @property
    def feeds_ahead(self) -> bool:
        """Whether stages have their inputs when a step begins."""
        return self.inputs_ahead and self.order.forwards_first

    @property
    def order(self) -> Schedule:
        """The schedule."""
        return find_schedule(self.schedule)

    @property
    def num_minibatches(self) -> int:
        """Mini-batches that it is about: several where the pipeline does not drain between them.

        They then are its micro-batches: ``minibatch_size`` is the samples of all.
        """
        return 1 if self.order.flushes else self.num_microbatches or 1

    def scheduled(self, schedule: str) -> PlanRequest:
        """The same question for another schedule.

        Of a schedule that does not drain the question is about :data:`IN_A_ROW` mini-batches.

        Raises:
            ValueError: the schedule is unknown; it has one micro-batch per mini-batch and others
                were asked for; this question is of one that does not drain already.
        """
        if schedule == self.schedule:
            return self
        if not self.order.flushes:
            raise ValueError(f"a request for {self.schedule!r} is for no other schedule")
        if find_schedule(schedule).flushes:
            return replace(self, schedule=schedule)
        if self.num_microbatches not in (None, 1):
            raise ValueError(
                f"schedule={ONE_F_ONE_B_ASYNC.name!r} does not cut mini-batches: num_microbatches "
                f"is 1, got {self.num_microbatches}; use schedule='gpipe' for more"
            )
        return replace(
            self,
            schedule=schedule,
            minibatch_size=IN_A_ROW * self.minibatch_size,
            num_microbatches=IN_A_ROW,
            max_replicas=1,
            may_recompute=False,
        )

    @property
    def is_estimated(self) -> bool:
        """Whether the costs are estimates."""
        return self.costs.is_estimated

    def named(self, planner: str) -> str:
        """The name of a planner in its plans, which says whether the costs are estimates."""
        return f"{planner} (estimated)" if self.is_estimated else planner

    @cached_property
    def microbatch_sizes(self) -> tuple[float, ...]:
        """The micro-batch sizes to choose from, in samples, ascending.

        The one size of a fixed number of micro-batches; otherwise the powers of two that divide
        the mini-batch (the sizes that GraphPipe searches, arXiv 2406.17145 section 5), and the
        mini-batch as a whole, without which one of 96 would be cut into three at least. Where these
        would leave many micro-batches only (a mini-batch of 50), the mini-batch is divided by
        powers of two instead, which makes micro-batches that differ by a sample. Sizes that would
        make more than :data:`MOST_MICROBATCHES` are left out.
        """
        size = self.minibatch_size
        if self.num_microbatches is not None:
            return (size / self.num_microbatches,)
        powers = [2**power for power in range(size.bit_length())]
        sizes = [float(power) for power in powers if not size % power]
        if size / sizes[-1] > FEW_MICROBATCHES:
            sizes = [size / power for power in reversed(powers)]
        elif sizes[-1] < size:
            sizes.append(float(size))
        return tuple(found for found in sizes if size / found <= MOST_MICROBATCHES)

    def replica_counts(self, available: int) -> tuple[int, ...]:
        """The numbers of replicas to choose from on so many devices: powers of two.

        As GraphPipe restricts them (arXiv 2406.17145, section 5); replicas share every micro-batch
        equally, so there are none where no input of the model can be cut by samples.
        """
        inputs = self.graph.inputs
        if inputs and not any(item.value.is_cuttable for item in inputs):
            return (1,)
        most = min(available, self.max_replicas or available)
        return tuple(2**power for power in range(most.bit_length()))

    def profile(self, microbatch_size: float, kind: str | None = None) -> Profile:
        """Costs for a micro-batch size on a kind of device (that of device 0 if not given)."""
        return self.tables.profile(microbatch_size, kind or self.cluster.kinds[0])

    def slowest_kind(self, microbatch_size: float) -> str:
        """The kind of device on which the model takes longest."""

        def work_s(kind: str) -> float:
            costs = self.profile(microbatch_size, kind).operators.values()
            return sum(cost.forward_s + cost.backward_s for cost in costs)

        return max(self.cluster.kinds, key=work_s)

    @cached_property
    def tables(self) -> RequestTables:
        """What all plans have in common, as far as it was asked for."""
        return RequestTables(self.graph, self.cluster, self.costs, self.sums_share)


Planner = Callable[[PlanRequest], Plan]
"""A planner."""


HOLDS_ALL = GPIPE.name
"""The schedule that is used where memory allows: stages hold all micro-batches of a mini-batch."""

HOLDS_FEW = ONE_F_ONE_B.name
"""The schedule whose stages hold as few micro-batches as a full pipeline needs."""

FASTEST = "fastest"
"""In the place of a schedule: whichever of these two is faster, if by more than 5 %."""

MEAN_OVER_SAMPLES = "it runs the step once per micro-batch: the loss must be a mean over samples"
"""What :data:`HOLDS_FEW` asks of the user."""


class DoesNotFitError(ValueError):
    """No plan of this planner fits into the devices' memory."""


def does_not_fit(request: PlanRequest, what: str) -> str:
    """The text of an error of memory, with what may help.

    Args:
        request: the question.
        what: does not fit.
    """
    limits = [d.memory_bytes for d in request.cluster.devices if d.memory_bytes is not None]
    ways = ["more devices, devices with more memory", "smaller mini-batches"]
    if not request.may_recompute:
        ways.append("recomputation (may_recompute=True; recompute=true on the command line)")
    if request.holds_all:
        ways.append(f'schedule="{HOLDS_FEW}" ({MEAN_OVER_SAMPLES})')
    return (
        f"{what} into the memory of {request.num_devices} devices "
        f"({bytes_text(min(limits, default=0))} on the smallest), as far as was searched; what may "
        f"help: {', '.join(ways)}"
    )
