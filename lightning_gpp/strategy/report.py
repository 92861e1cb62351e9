"""Prints plans and verdicts."""

from __future__ import annotations

import shutil
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from tqdm.auto import tqdm

from lightning_gpp.cluster.this_machine import num_cores
from lightning_gpp.common.progress import doing
from lightning_gpp.common.text_table import wrapped
from lightning_gpp.common.units_of_measure import bytes_text, devices_text, stages_text
from lightning_gpp.planner import evaluate_plan
from lightning_gpp.planner.plan_to_run import PlanToRun
from lightning_gpp.reports.plan.describe import describe_outputs, describe_plan, describe_what
from lightning_gpp.reports.plan.verdict import BatchTimes, PlanVerdict
from lightning_gpp.strategy.planning.profile_cache import OF_EARLIER_RUN
from lightning_gpp.strategy.settings import Settings

WIDEST = 100
"""Columns."""


def width() -> int:
    """Columns of the terminal, no more than people read."""
    return min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns)


def verdict_on(planned: PlanToRun, settings: Settings) -> PlanVerdict:
    """The verdict on a plan, which runs on the cores of this host unless others are meant."""
    evaluation = evaluate_plan(planned.plan, planned.request)
    cores = num_cores() if settings.cluster is None and not settings.is_emulated else None
    return PlanVerdict.of(evaluation, planned.request, num_cores=cores)


WITHHELD = "Verdict: follows when the first batches have been timed."
"""Instead of a predicted one: what short steps spend beside operators only batches tell."""


def describe_planned(planned: PlanToRun, settings: Settings, *, waits: bool = False) -> str:
    """The verdict on a plan, unless it ``waits`` for batches; then a few lines about it, or all."""
    evaluation, notes = evaluate_plan(planned.plan, planned.request), notes_of(planned)
    verdict = verdict_on(planned, settings)
    said = verdict.text(width())
    if waits:
        said = wrapped([WITHHELD, *([f"{verdict.sharing}."] if verdict.sharing else [])], width())
    if settings.report == "full":
        described = describe_plan(evaluation, planned.request, max_width=width())
        return "\n\n".join((said, described, *planned.notes))
    pace, fullest = evaluation.bottlenecks, max(evaluation.devices, key=lambda d: d.memory_bytes)
    devices = sorted({device for found in pace for device in found.stage.devices})
    limit = "" if fullest.limit_bytes is None else f" of {bytes_text(fullest.limit_bytes)}"
    lines = (
        describe_what(evaluation, planned.request),
        f"Bottleneck: {stages_text([found.stage.id for found in pace])} "
        f"({devices_text(devices)}), by {evaluation.pacemaker.bound}. Peak memory: "
        f"{bytes_text(fullest.memory_bytes)}{limit} on device {fullest.device}.",
        *(f"{text}." for text in describe_outputs(evaluation, planned.request)),
        *notes[:1],
        'For more: report="full" of the strategy, or `graphpipe job=plan`.',
    )
    return f"{said}\n{wrapped(lines, width())}"


def notes_of(planned: PlanToRun) -> list[str]:
    """The notes on a plan that are worth a line."""
    return [note for note in planned.notes if not note.startswith(OF_EARLIER_RUN)]


NUM_WARM_UP = 1
"""Batches that are not counted: building the pipeline, allocations, lazy optimizer state."""

ENOUGH_S = 1.0
"""As many batches are counted as take so long: short ones, which differ most from each other, are
many. Their median is told: a validation between two of them, or the first ones, which may still be
a little slower, do not move it."""

FEWEST_COUNTED = 3
"""However long they are."""


class PlanReports:
    """Prints the plan of a Trainer, and what batches by it take once that is known; on rank 0.

    Of further plans (other loops, other batches) it prints what they are, in a line.

    Attributes:
        shown_plan: the plan that a person has seen last.
        batch_times: what batches took, once enough of them have begun; from then on a batch costs
            a comparison.
    """

    def __init__(self) -> None:
        self.shown_plan = ""
        self._is_told = self._waits = False
        self._shown_note = ""
        self._verdict: PlanVerdict | None = None
        self._begin_timing()

    def _begin_timing(self) -> None:
        self.batch_times: BatchTimes | None = None
        self._num_begun = 0
        self._last: tuple[float, float] | None = None
        self._took: list[tuple[float, float]] = []

    def built(
        self, planned: PlanToRun, settings: Settings, loop: str, *, can_time: bool = False
    ) -> None:
        """A pipeline of this plan has been built.

        Args:
            planned: the plan.
            settings: what the user asked for.
            loop: that needs it, such as ``validate``.
            can_time: whether its batches can be timed.
        """
        self._verdict = verdict_on(planned, settings)
        shown, before = repr((planned.plan, planned.request.schedule)), self.shown_plan
        if shown != before:
            # Emulated steps have a report of their own.
            self.shown_plan, self._is_told = shown, settings.is_emulated
            note = "".join(notes_of(planned)[:1])
            if before and settings.report != "full":
                what = describe_what(evaluate_plan(planned.plan, planned.request), planned.request)
                lines = [f"For {loop}: {what}", note if note != self._shown_note else ""]
                show(wrapped(filter(None, lines), width()))
            else:
                is_several = self._verdict.num_devices > 1
                self._waits = can_time and not settings.is_emulated and is_several
                show(describe_planned(planned, settings, waits=self._waits))
            self._shown_note = note
        self._begin_timing()

    def batch_begins(self, *, is_recorded: bool, in_pipeline_s: float | None) -> None:
        """A batch is trained.

        Args:
            is_recorded: whether it is recorded: it takes longer, and is followed by the gathering
                and the picture of the record, so it does not count.
            in_pipeline_s: seconds that batches spent in the pipeline so far; None where these
                cannot be told from the user's step.
        """
        if self._is_told or self._verdict is None:
            return
        now = time.monotonic(), in_pipeline_s or 0.0
        if self._last is not None:
            batch_s, pipeline_s = (end - start for end, start in zip(now, self._last, strict=True))
            self._took.append((batch_s, batch_s - pipeline_s))
        self._num_begun += 1
        self._last = None if is_recorded or self._num_begun <= NUM_WARM_UP else now
        took = [batch_s for batch_s, _ in self._took]
        # A validation among them makes them longer, but not their median.
        if sum(took) >= ENOUGH_S and statistics.median(took) * len(took) >= ENOUGH_S:
            self._tell()

    def _tell(self) -> None:
        if self._is_told or self._verdict is None or len(self._took) < FEWEST_COUNTED:
            return
        batch_s, own_s = (statistics.median(times) for times in zip(*self._took, strict=True))
        times = BatchTimes(batch_s, len(self._took), own_s if own_s < batch_s else None)
        show(self._verdict.measured_text(times, width()))
        self.batch_times, self._is_told, self._waits = times, True, False

    def training_ends(self) -> None:
        """What batches took is said of fewer, too; if there were none, what was predicted is."""
        self._tell()
        if self._waits and self._verdict is not None:
            show(self._verdict.text(width()))
        self._waits = False


def show(text: str) -> None:
    """Prints on rank 0, between progress bars instead of into them."""
    with tqdm.external_write_mode():
        rank_zero_info(text)


def waiting_for(what: str, module: LightningModule) -> AbstractContextManager[None]:
    """On rank 0 a line says so if the body takes more than two seconds.

    Args:
        what: the body does, such as ``Measuring the model``.
        module: whose Trainer knows the rank.
    """
    return doing(what, show) if module.trainer.is_global_zero else nullcontext()


def warn_of_little_room(lacking: Sequence[tuple[int, int, int]]) -> None:
    """Warns where a plan needs more memory than is there once ranks are connected.

    Args:
        lacking: ranks, bytes that the plan needs of each, and bytes that are there.
    """
    for rank, needed, room in lacking:
        rank_zero_warn(
            f"the plan needs {bytes_text(needed)} on rank {rank}, whose device has "
            f"{bytes_text(room)} free; training may run out of memory. End other processes, or "
            "name a cluster file with less memory per device: GraphPipeStrategy(cluster=...)."
        )


NOTICEABLE = 0.1
"""Of all parameters: more of them outside of the pipelined forward are worth a line."""


def tell_of_outside(module: nn.Module, target: nn.Module, read: Sequence[str]) -> None:
    """Says which children have parameters that the pipelined forward does not read.

    Args:
        module: the user's.
        target: whose forward is pipelined.
        read: names of parameters of ``target``.
    """
    known, counts, total = {id(target.get_parameter(n)) for n in read}, Counter[str](), 0
    for name, parameter in module.named_parameters():
        total += parameter.numel()
        if id(parameter) not in known:
            counts[name.partition(".")[0]] += parameter.numel()
    if counts.total() > NOTICEABLE * total:
        found = ", ".join(f"{name} ({count:,} parameters)" for name, count in counts.items())
        show(f"Not in the pipelined forward, so it stays on rank 0: {found}.")


def warn_of_no_call(module: nn.Module, target: nn.Module) -> None:
    """Warns that a training step did not call the pipelined forward."""
    rank_zero_warn(
        f"training_step of {type(module).__name__} did not call the forward of "
        f"{type(target).__name__}, so nothing was pipelined: the batch ran on one device. Call it "
        "(self(...)), or name the sub-module that the step calls: GraphPipeStrategy(module='...')."
    )


BATCH_STATISTICS = (
    "BatchNorm takes its statistics from each of the {} micro-batches, as from each process under "
    "DDP, so losses differ from one device. GraphPipeStrategy(num_microbatches=1) takes those of "
    "the whole batch."
)


def warn_of_state(names: Sequence[str], num_microbatches: int) -> None:
    """Says which buffers a cut mini-batch leaves with other values than one device does.

    Args:
        names: qualified names of the buffers.
        num_microbatches: of the mini-batch.
    """
    modules = sorted({name.rpartition(".")[0] or "the module itself" for name in names})
    rank_zero_warn(
        f"forward updates the buffers {', '.join(names)} (of {', '.join(modules)}) once for each "
        f"of the {num_microbatches} micro-batches, so they differ from one device. Use "
        "GraphPipeStrategy(num_microbatches=1), which is exact, or put these modules into eval "
        "mode if their buffers need not change."
    )
