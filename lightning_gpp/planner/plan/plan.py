"""A plan: which operators form which stage on which device.

Plans are plain data with a versioned JSON form: they can be printed, compared, edited by hand and
given to the strategy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lightning_gpp.common.data_file import read_text
from lightning_gpp.common.strict_json import JsonFormat


@dataclass(frozen=True, slots=True)
class Stage:
    """A convex set of operators placed on one device (or one replica group).

    Attributes:
        id: position in topological order, from 0.
        operators: operator names, in topological order.
        devices: indices into the cluster's devices; more than one means data-parallel replicas:
            each of them takes a consecutive share of the samples of every micro-batch.
        microbatch_multiple: how many of the plan's smallest micro-batches the stage, all replicas
            together, processes at a time (GraphPipe's micro-batch size per stage, arXiv 2406.17145,
            section 5.3).
        recompute: whether the stage keeps only its inputs between forward and backward, and runs
            its forward again before the backward.
        shares: smallest micro-batches that each replica takes, in the order of ``devices``; they
            sum to ``microbatch_multiple``. Empty: equal shares, and the number of devices must
            divide ``microbatch_multiple``.
    """

    id: int
    operators: tuple[str, ...]
    devices: tuple[int, ...]
    microbatch_multiple: int = 1
    recompute: bool = False
    shares: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.operators:
            raise ValueError(f"stage {self.id} holds no operator")
        if not self.devices:
            raise ValueError(f"stage {self.id} is on no device")
        if self.microbatch_multiple < 1:
            raise ValueError(
                f"stage {self.id}: microbatch_multiple must be at least 1, "
                f"got {self.microbatch_multiple}"
            )
        if len(set(self.devices)) != len(self.devices):
            raise ValueError(f"stage {self.id} names a device twice: {list(self.devices)}")
        shares, count = self.shares, len(self.devices)
        are_sound = len(shares) == count and min(shares, default=0) > 0
        if shares and not (are_sound and sum(shares) == self.microbatch_multiple):
            raise ValueError(
                f"stage {self.id}: expected one share of at least 1 for each of its {count} "
                f"devices, together {self.microbatch_multiple} (its microbatch_multiple), got "
                f"{list(shares)}"
            )
        if not shares and self.microbatch_multiple % count:
            raise ValueError(
                f"stage {self.id}: its {count} devices take equal shares of a "
                f"micro-batch, so microbatch_multiple must be a multiple of {count}, "
                f"got {self.microbatch_multiple}; or give their shares"
            )

    @property
    def num_replicas(self) -> int:
        """Data-parallel copies of the stage."""
        return len(self.devices)

    @property
    def replica_multiples(self) -> tuple[int, ...]:
        """Smallest micro-batches in the share of each replica."""
        equal = self.microbatch_multiple // len(self.devices)
        return self.shares or (equal,) * len(self.devices)


@dataclass(frozen=True, slots=True)
class Plan:
    """Stages in topological order. The last one computes the loss.

    Attributes:
        stages: the stages; ``stages[i].id == i``.
        planner: name of the planner that made it (``"manual"`` for one made by hand).
        num_microbatches: smallest micro-batches in a mini-batch, the unit of
            ``microbatch_multiple``; None leaves the number to the caller.
        is_chain: whether every stage also waits for the stage before it, as in pipelines without
            branches. Stages that share no data are then ordered by empty messages.
        order_pace: which micro-batch a device with several stages runs first, where all forwards
            come before all backwards: 0 prefers the stage with the longest path to the end, 1
            finishes a micro-batch before the next. None chooses by the plan.
        loss_device: device on which the outputs are gathered for the loss; None: the first device
            of the last stage.

    Raises:
        ValueError: stage ids are not 0, 1, 2, …
    """

    stages: tuple[Stage, ...]
    planner: str = "manual"
    num_microbatches: int | None = None
    is_chain: bool = False
    order_pace: float | None = None
    loss_device: int | None = None

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("a plan needs at least one stage")
        if [stage.id for stage in self.stages] != list(range(len(self.stages))):
            raise ValueError(
                f"stage ids must count up from 0, got {[stage.id for stage in self.stages]}"
            )
        if self.order_pace is not None and not 0 <= self.order_pace <= 1:
            raise ValueError(f"order_pace must be a number from 0 to 1, got {self.order_pace}")
        for stage in self.stages:
            if self.num_microbatches and self.num_microbatches % stage.microbatch_multiple:
                raise ValueError(
                    f"stage {stage.id}: microbatch_multiple {stage.microbatch_multiple} does not "
                    f"divide the plan's {self.num_microbatches} micro-batches"
                )

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stages)

    @property
    def num_devices(self) -> int:
        """One more than the highest device index in use."""
        used = [device for stage in self.stages for device in stage.devices]
        return 1 + max(*used, self.device_of_loss)

    @property
    def device_of_loss(self) -> int:
        """Device on which the loss is computed."""
        last = self.stages[-1].devices[0]
        return last if self.loss_device is None else self.loss_device

    @property
    def stage_operators(self) -> Sequence[Sequence[str]]:
        """Operator names of each stage."""
        return [stage.operators for stage in self.stages]


FORMAT = JsonFormat("lightning_gpp.plan", version=2, older=(1,))
plan_to_json = FORMAT.dumps
plan_from_json = partial(FORMAT.loads, Plan)


def save_plan(plan: Plan, path: str | Path) -> None:
    """Writes a plan to a file."""
    Path(path).write_text(plan_to_json(plan), encoding="utf-8")


def load_plan(path: str | Path) -> Plan:
    """Reads a plan from a file.

    Raises:
        ValueError: there is no such file, or it is not a plan.
    """
    expected = (
        "a plan file (the plan.json of a graphpipe run), or a list of stages with module names"
    )
    return plan_from_json(read_text(path, expected), source=Path(path).name)
