"""The state of a run on one rank: connections, module, pipeline."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils import _pytree as pytree

from lightning_gpp.common.host_copies import Originals, to_device
from lightning_gpp.common.interrupt import HeldInterrupt, interrupted_later
from lightning_gpp.runtime.processes.peers import Peers
from lightning_gpp.runtime.transport.process_transport import ProcessTransport
from lightning_gpp.runtime.waits import Waits
from lightning_gpp.schedule import SCHEDULES
from lightning_gpp.strategy.cutting.microbatches import default_microbatches, unit_sizes
from lightning_gpp.strategy.lightning_private import receive_sigterm, tell_device
from lightning_gpp.strategy.logging.logs import LogCall
from lightning_gpp.strategy.pipeline import Pipeline, pipelined_module, pipelined_name
from lightning_gpp.strategy.ranks.control import Control
from lightning_gpp.strategy.ranks.failure import FailureWatch
from lightning_gpp.strategy.ranks.messages import News, StepEnd, Told, UseForm
from lightning_gpp.strategy.recording.recorder import StepRecorder
from lightning_gpp.strategy.report import BATCH_STATISTICS, show, waiting_for, warn_of_state
from lightning_gpp.strategy.settings import Settings
from lightning_gpp.strategy.spmd.spmd_model import SpmdModel
from lightning_gpp.strategy.state.callbacks import HeldAverage, held_averages
from lightning_gpp.strategy.state.early_modules import early_modules
from lightning_gpp.strategy.state.held_elsewhere import HeldElsewhere
from lightning_gpp.strategy.state.leader_state import LeaderState
from lightning_gpp.strategy.state.optimizers import PartialOptimizer
from lightning_gpp.strategy.state.partition import Partition
from lightning_gpp.strategy.state.sharded_checkpoint import ShardedCheckpoint
from lightning_gpp.strategy.state.step_gradients import OwnGradients, average_gradients
from lightning_gpp.weights.last_steps import LastSteps

log = logging.getLogger(__name__)


class PipelinedRun:
    """The connections, the module and the pipeline of one rank during a run.

    Args:
        settings: what the user asked for.
        device: where this rank's stages run.
        peers: this rank in the other pipelines; None if there is one.
        builder: builds the model on all ranks, given the run and, on rank 0, what it is built from;
            see :func:`lightning_gpp.strategy.build.build_pipeline`.

    Attributes:
        model: what is built, however it is divided; None before.
        forms: pipelines of all forms in which the forward has been called; one of them is the
            model.
        has_module: whether a module is attached.
        module: the LightningModule.
        target: the module in it whose forward is pipelined.
        leader_state: what user code on rank 0 changes.
        is_alone: whether there is no other rank in this pipeline, which would have to be told.
        clock: of rank 0: what of its time is the pipeline's.
        peers: likewise.
        num_pipelines: how many there are.
        full_batch: samples of a full mini-batch; smaller ones get fewer micro-batches.
        originals: of batches on the device.
        train_batches: rank 0: the iteration of the training data that is under way, if it may be
            read ahead.
        inputs_ahead: rank 0: whether the inputs of steps are likely to be sent ahead.
        last_steps: of the optimizers, where weights are predicted by them.
        dropped: calls of the forward that rank 0 let go since it told the others last.
        in_pipeline_s: seconds that rank 0 spent in calls of the forward and in their backwards.
        saved_optimizers: has the state of the optimizers, which they have not read yet.
        partial_optimizers: the optimizers, with what this rank holds of their parameters.
        averages: of the weights, which callbacks keep.
        train_modes: training flags of the target and its sub-modules while training, by name.
        accumulates: whether more backwards follow before the optimizer steps.
        around_aside: user code outside of steps runs in this, given its name.
        interrupt: Ctrl-C on rank 0, from when other ranks may step their optimizers until
            Lightning has counted the batch here, too.
        is_placing: whether parameters are on their way to the ranks that hold them.
        stays_whole: whether forward runs as it is, on one device.
        num_plans: that there have been; each divides the model anew.
    """

    def __init__(
        self,
        settings: Settings,
        device: torch.device,
        peers: Peers | None = None,
        *,
        builder: Callable[[PipelinedRun, Any], None],
    ) -> None:
        self.settings = settings
        self.builder = builder
        self.peers = peers
        self.num_pipelines = 1 if peers is None else peers.num_pipelines
        self.device = device
        self.waits = Waits() if self.peers is None else self.peers.waits
        self.transport = ProcessTransport(
            device, None, settings.timeout_s, self.waits, num_pipelines=self.num_pipelines
        )
        self.is_alone = self.transport.num_ranks == 1
        self.model: Pipeline | SpmdModel | None = None
        self.forms: list[Pipeline] = []
        self.failures = FailureWatch(lambda error: self.waits.abort(error))
        self.interrupt = HeldInterrupt()
        self.control = Control(self.transport, settings.timeout_s)
        self.around_aside: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()
        self.on_built: Callable[[], None] = lambda: None
        self.recorder = StepRecorder(self.device)
        self.in_pipeline_s = 0.0
        self.own_gradients = OwnGradients({})
        self.full_batch, self.originals = 0, Originals()
        self.train_batches: Any = None
        self.inputs_ahead = False
        self.last_steps: list[LastSteps] = []
        self.dropped: list[int] = []
        self.saved_optimizers: ShardedCheckpoint | None = None
        self.partial_optimizers: list[PartialOptimizer] = []
        self.averages: list[HeldAverage] = []
        self.accumulates = False
        self.is_placing = self.stays_whole = False
        self.num_plans = 1
        self.has_module = False
        self.module: pl.LightningModule
        self.target: nn.Module
        self.leader_state: LeaderState
        self._early = ExitStack()
        self.optimizers: Sequence[Optimizer] = ()
        self._ids_of_stages: frozenset[int] = frozenset()
        self.train_modes: dict[str, bool] = {}
        self._has_shown_state = False
        self._is_end_agreed = False
        self._changing: frozenset[str] = frozenset()

    def __reduce__(self) -> Any:
        """Connections of a running process have no copy: a copy of a run is None."""
        return type(None), ()

    def attach(self, module: pl.LightningModule, optimizers: Sequence[Optimizer]) -> None:
        """Takes the whole module and the optimizers of all its parameters.

        Raises:
            TypeError: an optimizer looks at all parameters together, so it cannot be split.
        """
        if not self.is_alone and any(isinstance(each, LBFGS) for each in optimizers):
            raise TypeError(
                "LBFGS takes inner products over all parameters, which are spread over ranks here; "
                "use an optimizer that treats every parameter by itself (SGD, Adam, AdamW, ...)"
            )
        self.module, self.has_module = module, True
        self.leader_state = LeaderState(module, optimizers, not self.is_alone)
        self.settings = replace(self.settings, module=pipelined_name(module, self.settings.module))
        self.target = pipelined_module(module, self.settings.module)
        self.optimizers = optimizers
        self.train_modes = modes_of(self.target)
        if self.settings.is_asynchronous:
            self.last_steps = [LastSteps(optimizer) for optimizer in optimizers]
        self._early.enter_context(early_modules(module, self.target, self.device))

    @contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """Rank 0: user code that no message goes with runs in this, here and nowhere else."""
        with self.failures.guard(), self.control.alone(what):
            yield

    @property
    def is_everywhere(self) -> bool:
        """Whether the user code that runs now runs on all ranks."""
        return self.is_alone or self.control.alone_in is None

    def lead(self, message: Any) -> None:
        """Rank 0: tells the others what to do, and what happened since the last message."""
        if self.is_alone:
            self.dropped.clear()
            return
        # Garbage collection may append to it at any moment.
        dropped = [self.dropped.pop() for _ in range(len(self.dropped))]
        changes, gradients = self.leader_state.take_changes(), self.own_gradients.take()
        self.control.tell(Told(message, News(changes, dropped, gradients)))

    def lead_end(self, calls: list[LogCall], loss: Tensor | None) -> None:
        """Rank 0: tells the others that a step has returned, what it logged and its loss."""
        terminated = self.failures.terminated
        if self.peers is not None and not self._is_end_agreed:
            terminated = None  # not before the other pipelines know
        self.lead(StepEnd(calls, loss, terminated))
        self.end_if_asked(terminated)

    def end_if_asked(self, terminated: int | None) -> None:
        """All ranks: the run ends with this step if a rank, whose number it is, was asked to."""
        if terminated is not None:
            self.failures.ends_with_step = True
            if self.control.is_leader:
                text = "rank %d was asked to end (SIGTERM): all ranks end after this step"
                log.warning(text, terminated)
            receive_sigterm(self.module.trainer)

    def take_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Other ranks: takes the gradients over that rank 0's own code changed."""
        for name, gradient in gradients.items():
            parameter = self.module.get_parameter(name)
            if not parameter.is_meta:
                parameter.grad = to_device(gradient, parameter.device)

    def average_gradients(self) -> None:
        """All ranks of all pipelines: gradients become their mean over the pipelines.

        Buffers that training changes become those of the first pipeline, as in DDP.
        """
        if self.peers is None or self.accumulates:
            return
        is_asked = self.control.is_leader and self.failures.terminated is not None
        parameters = self.partition.held_parameters()
        ends = average_gradients(parameters, self.peers, is_asked_to_end=is_asked)
        buffers = self.partition.held_values(self._changing)
        self.peers.spread(buffers, "taking over the buffers of the first pipeline")
        if ends and self.control.is_leader:
            self._is_end_agreed = True
            self.failures.terminated = self.failures.terminated or 0

    def held_elsewhere(self) -> HeldElsewhere | nullcontext[None]:
        """User code of a rank runs in this that does not hold, or will not hold, all parameters."""
        if self.model is not None and not self.model.partition.is_partial:
            return nullcontext()
        return HeldElsewhere(self.device, self._ids_of_stages)

    @property
    def can_stay_whole(self) -> bool:
        """Whether a training is the same if nothing is divided."""
        is_real = not self.settings.is_emulated and self.settings.full_graph is None
        return self.is_alone and self.peers is None and is_real and not self.suspends_steps

    @property
    def can_time(self) -> bool:
        """Whether the time in the pipeline can be told from that of user code.

        Not on a GPU, whose work is not over when a call returns, nor within the pipeline.
        """
        is_plain = self.device.type == "cpu" and not self.is_alone
        return is_plain and not self.suspends_steps

    # What is built -----------------------------------------------------------------------------

    @property
    def suspends_steps(self) -> bool:
        """Whether training steps run in the midst of the schedule, where they wait for outputs."""
        schedule = self.settings.schedule if self.pipeline is None else self.pipeline.schedule
        found = SCHEDULES.get(schedule or "")
        return self.settings.is_asynchronous or (found is not None and not found.forwards_first)

    @property
    def partition(self) -> Partition:
        """Which rank holds which parameters; available once the pipeline is built."""
        assert self.model is not None, "no forward was called yet"
        return self.model.partition

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline, once it is built; None where the model is divided by an SPMD program."""
        return self.model if isinstance(self.model, Pipeline) else None

    @property
    def built(self) -> Pipeline:
        """The pipeline, which is built."""
        assert isinstance(self.model, Pipeline), "no forward was called yet"
        return self.model

    def unit_sizes(self, num_samples: int, *, is_training: bool = True) -> list[int]:
        """Samples of each of the smallest micro-batches of a mini-batch.

        Of a full one they are as many as asked, as planned, or a first guess. Planners make more,
        smaller ones, which replicas share; in a plan made by hand they are what its stages count.
        """
        at_a_time, fewest, settings, planned = 1, 1, self.settings, None
        if self.pipeline is not None:
            placed, planned = self.pipeline.placed, self.pipeline.plan.num_microbatches
            if is_training or placed.is_uneven:
                at_a_time, fewest = placed.units_at_a_time, min(placed.multiples)
            elif num_samples >= placed.replicas_at_a_time:
                at_a_time = placed.replicas_at_a_time
        asked = settings.num_microbatches
        first, second = (planned, asked) if settings.plan is None else (asked, planned)
        return unit_sizes(
            num_samples,
            full=max(self.full_batch, num_samples),
            asked=first or second or default_microbatches(self.control.num_ranks),
            at_a_time=at_a_time,
            fewest=fewest,
        )

    def show_state(self, num_microbatches: int) -> None:
        """Rank 0: says, once, which buffers training changes for every micro-batch."""
        if self._has_shown_state or num_microbatches == 1:
            return
        self._has_shown_state = True
        captured = self.built.captured
        if names := [self.settings.prefix + name for name in captured.unsteady]:
            warn_of_state(names, num_microbatches)
        if len(captured.changing - captured.verified.steady) > len(names):
            show(BATCH_STATISTICS.format(num_microbatches))

    def on_device(self, value: Any) -> Any:
        """Moves the content of a control message, which is on the CPU, to this rank's device."""
        if self.device.type == "cpu":
            return value
        return pytree.tree_map_only(Tensor, lambda each: to_device(each, self.device), value)

    def take(
        self,
        model: Pipeline | SpmdModel,
        kind: type[PartialOptimizer],
        changing: Collection[str],
    ) -> None:
        """All ranks: the model is built; the module becomes partial.

        ``kind`` is that of its optimizers; ``changing`` are the buffers that training changes.
        """
        self.partial_optimizers = [kind(each, model.partition) for each in self.optimizers]
        for partial in self.partial_optimizers:
            partial.check()
        self._changing, self.is_placing = frozenset(changing), True
        with interrupted_later():
            self._place(model)
        self.take_saved_optimizers()
        self.on_built()

    def _place(self, model: Pipeline | SpmdModel) -> None:
        partition = model.partition
        held, holders = partition.held_parameters(), partition.holders
        for partial in self.partial_optimizers:
            partial.keep_held()
        with waiting_for("Giving every rank its parameters", self.module):
            partition.spread()
            if self.peers is not None:
                values = partition.held_values()
                self.peers.spread(values, "waiting for the initial weights of the first pipeline")
        for partial in self.partial_optimizers:
            partial.place_state()
        if self.device.type != "cpu":
            tell_device(self.module, self.device)
        self._ids_of_stages = frozenset(map(id, held))
        self.own_gradients = OwnGradients(partition.held_with_others())
        self.averages = held_averages(self.module.trainer, partition)
        elsewhere = frozenset(name for name, ranks in holders.items() if ranks != (0,))
        if isinstance(model, Pipeline):
            self.take_form(model)
        else:  # all ranks write the same into their buffers
            elsewhere -= self._changing
        self.leader_state.settle(elsewhere)
        self.model, self.is_placing = model, False

    def take_form(self, pipeline: Pipeline) -> None:
        """All ranks: the pipeline of a form of call is built, on the parameters that ranks hold."""
        pipeline.settle(self.target, self.partial_optimizers)
        self.forms.append(pipeline)

    def to_form(self, pipeline: Pipeline) -> None:
        """Rank 0: all ranks use the pipeline of a form of call."""
        if self.model is not pipeline:
            self.lead(UseForm(self.forms.index(pipeline)))
            self.model = pipeline

    @contextmanager
    def whole_optimizers(self) -> Iterator[None]:
        """Optimizers have the parameters of one device while the body runs; parts stay parts."""
        with ExitStack() as stack:
            if self.model is not None:
                for partial in self.partial_optimizers:
                    stack.enter_context(partial.whole_groups())
                stack.enter_context(self.partition.parts_in_place())
            yield

    def take_saved_optimizers(self) -> None:
        """Reads what a sharded checkpoint has of the state that this rank's optimizers hold."""
        saved, self.saved_optimizers = self.saved_optimizers, None
        if saved is None:
            return
        is_built = self.pipeline is not None
        kept = [partial.held_by_index() for partial in self.partial_optimizers]
        states = saved.optimizers(kept if is_built else None)
        with self.whole_optimizers():
            for optimizer, state in zip(self.optimizers, states, strict=True):
                groups = optimizer.state_dict()["param_groups"]
                optimizer.load_state_dict({"state": state["state"], "param_groups": groups})

    def reconnect(self) -> None:
        """All ranks, after a failure: messages of before may be on their way, so groups are new."""
        self.transport.hang_up()
        timeout_s, self.waits = self.settings.timeout_s, Waits()
        cpu, pipelines = torch.device("cpu"), self.num_pipelines
        self.transport = ProcessTransport(
            cpu, "gloo", timeout_s, self.waits, num_pipelines=pipelines
        )
        self.control.transport = self.transport

    def stop_early_modules(self) -> None:
        """What was moved in front of the forward is back, and nothing moves from now on."""
        self._early.close()


def modes_of(module: nn.Module) -> dict[str, bool]:
    """Training flags of the sub-modules, by name."""
    return {name: part.training for name, part in module.named_modules()}
