"""Builds the pipeline of a run, on all ranks together: capture, costs, plan, this rank's stages."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from lightning_gpp.capture import (
    CapturedModel,
    CaptureError,
    StageModule,
    capture,
    on_host,
    placed,
    profile_costs,
)
from lightning_gpp.capture.tracing.keep_whole import WholeMethod
from lightning_gpp.common.mapped_tensor import freed_at_once, is_mapped
from lightning_gpp.common.torch_device import room_bytes
from lightning_gpp.common.without_collection import collecting_only_new
from lightning_gpp.cost import Costs
from lightning_gpp.emulation.emulation import Emulation
from lightning_gpp.gnn import ChunkedModel, chunk_costs, mixing_methods, without_caches
from lightning_gpp.gnn.chunked_model import ChunkStage
from lightning_gpp.graph import FEED, StageGraph
from lightning_gpp.planner import Plan, PlanGraph, evaluate_plan, plan_graph
from lightning_gpp.planner.base import DoesNotFitError
from lightning_gpp.planner.plan.by_rank import rank_of_device
from lightning_gpp.planner.plan_to_run import PlanToRun
from lightning_gpp.runtime.executor import Executor
from lightning_gpp.runtime.pieces import Cutter
from lightning_gpp.runtime.stage_run import StageCode, StageFunction
from lightning_gpp.runtime.staying_inputs import StayingInputs
from lightning_gpp.runtime.sums import ProcessSums
from lightning_gpp.schedule import ONE_F_ONE_B_ASYNC
from lightning_gpp.schedule.lower import reduce_groups
from lightning_gpp.schedule.program_parts import ReduceGroup
from lightning_gpp.strategy.devices.devices_at_hand import DeviceAtHand, cluster_at_hand
from lightning_gpp.strategy.lightning_private import tell_device
from lightning_gpp.strategy.logging.logs import recording
from lightning_gpp.strategy.pipeline import Pipeline
from lightning_gpp.strategy.pipelined_run import PipelinedRun, modes_of
from lightning_gpp.strategy.planning.example import GraphCall, model_in_chunks
from lightning_gpp.strategy.planning.planning import Example, Measured, plan_pipeline
from lightning_gpp.strategy.planning.profile_cache import profiled
from lightning_gpp.strategy.report import tell_of_outside, waiting_for, warn_of_little_room
from lightning_gpp.strategy.settings import fewest_per_update
from lightning_gpp.strategy.state.held_elsewhere import lifted
from lightning_gpp.strategy.state.optimizers import PartialOptimizer
from lightning_gpp.strategy.state.partition import Partition

CPU = torch.device("cpu")


def build_pipeline(run: PipelinedRun, example: Example | None) -> None:
    """All ranks: captures the model, agrees on a plan and builds this rank's stages.

    Args:
        run: of this rank, which has the pipeline afterwards.
        example: a micro-batch, known on rank 0.

    Raises:
        RuntimeError: forward logs.
    """
    is_in_files = any(map(is_mapped, run.module.parameters()))
    collecting = freed_at_once() if is_in_files else collecting_only_new()
    with collecting, torch.inference_mode(False):  # what moves would be inference tensors
        run.stop_early_modules()
        if run.module.training:
            run.train_modes = modes_of(run.target)
        logged: list[str] = []
        note = recording(run.module, lambda name, *args, **kwargs: logged.append(name))
        with note, torch.enable_grad(), lifted():
            pipeline = PipelineBuild(run, example).pipeline()
        if logged:
            raise RuntimeError(
                f"forward logs {logged[0]!r}, which a pipelined forward cannot: it is captured "
                "once and runs on several ranks. Return the value and log it in the step."
            )
        run.take(
            pipeline,
            PartialOptimizer,
            [run.settings.prefix + name for name in pipeline.captured.changing],
        )


class PipelineBuild:
    """One building: what its parts have found so far.

    Args:
        run: of this rank.
        example: a micro-batch, known on rank 0.
    """

    captured: CapturedModel

    def __init__(self, run: PipelinedRun, example: Example | None) -> None:
        self.run, self.example = run, example
        self.settings, self.control = run.settings, run.control
        self.chunked: ChunkedModel | None = None
        self.planned: PlanToRun | None = None
        self.found: Sequence[DeviceAtHand] = ()
        self.measured: Measured | None = None

    def pipeline(self) -> Pipeline:
        """This rank's part of the pipeline."""
        run, control, full_graph = self.run, self.control, self.settings.full_graph
        if full_graph is None:
            args, kwargs = self.capture_shared()
        else:
            args, kwargs = self.shared()
            call = GraphCall.of(run.target, args, kwargs)
            with without_caches(run.target):
                self.capture(call.args, call.kwargs, mixing_methods(run.target))
            flags = run.train_modes
            with waiting_for("Dividing the graph into chunks", run.module):
                chunked = model_in_chunks(full_graph, self.captured, call, flags, control)
            self.captured.take_graph(chunked.graph, chunked.in_ways.operators)
            self.chunked = chunked
        self._look(args, kwargs)
        pipeline = self._within_memory(self._by_plan())
        if control.is_leader and control.num_ranks > 1:
            read = [each.name for each in self.captured.graph.parameters]
            tell_of_outside(run.module, run.target, read)
        if self.chunked is not None:  # stages keep what they read of the graph, and no more
            codes = pipeline.executor.stages.values()
            self.chunked.keep_arguments({name for code in codes for name in code.inputs})
        return pipeline

    def shared(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Rank 0's first micro-batch, on the device where this rank captures the model.

        That is the rank's own if it is of rank 0's type: all ranks have to see the same graph. One
        that is divided into chunks is in host memory, and so is the model then.
        """
        run, example = self.run, self.example
        told = None
        if example is not None:
            given = tuple(example.args), dict(example.kwargs)
            staying = [] if run.device.type == "cpu" else on_host(given)  # lengths, for example
            told = placed(given, CPU), run.device.type, staying
        given, leader_type, staying = self.control.share(told, "waiting for the first micro-batch")
        is_alike = run.device.type == leader_type and self.settings.full_graph is None
        device = run.device if is_alike else CPU
        if run.device.type != "cpu":
            tell_device(run.module, device)
        args, kwargs = placed(given, device, staying)
        return tuple(args), dict(kwargs)

    def capture_shared(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """All ranks capture the model with the first micro-batch, or with all; returns that."""
        given = self.shared()
        if not self.capture(*given):
            self.example = self.example and self.example.otherwise
            given = self.shared()
            self.capture(*given)
        return given

    def capture(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        opened: Mapping[str, Sequence[WholeMethod]] = MappingProxyType({}),
    ) -> bool:
        """All ranks capture the model; the others what rank 0 has verified.

        Returns:
            Whether the forward takes these samples, if it may be given others.

        Raises:
            RuntimeError: ranks or pipelines have captured different models.
        """
        run, control, settings = self.run, self.control, self.settings
        verified = None
        if not control.is_leader:
            verified = control.hear("waiting until rank 0 has captured the model")
            if verified is None:
                return False
        with waiting_for("Capturing the model", run.module):
            try:
                self.captured = capture(
                    run.target,
                    args,
                    kwargs,
                    leaf_modules=settings.leaf_modules,
                    blocks=settings.blocks,
                    opened=opened,
                    train_modes=run.train_modes,
                    verified=verified,
                )
            except Exception as error:  # of the user's code
                is_last = self.example is None or self.example.otherwise is None
                if is_last or isinstance(error, CaptureError):
                    raise
                control.tell(None)
                return False
            if control.is_leader:
                control.tell(self.captured.verified)
            own, purpose = self.captured.fingerprint, "comparing the captured models"
            others = control.gather(own, purpose)
            if run.peers is not None and control.is_leader:
                others += run.peers.gather(own, purpose)
            if any(other != own for other in others):
                raise RuntimeError(
                    "not all ranks captured the same model; all must build the same one and take "
                    "the same path through its forward"
                )
        return True

    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """All ranks: what devices there are, and what the model costs on them, if it is not known.

        Pipelines side by side run the plan of the first one, which looks alone.
        """
        run = self.run
        if run.peers is not None and run.peers.pipeline > 0:
            return
        own = DeviceAtHand.of(run.device)
        self.found = self.control.gather(own, "collecting what devices there are")
        if not isinstance(self.settings.costs, Costs):
            with waiting_for("Measuring the model", run.module):
                self.measured = self._measured(args, kwargs, self.found)

    def _by_plan(self, rooms: Sequence[int | None] = ()) -> Pipeline:
        """All ranks: this rank's part of the pipeline of a plan that is made here.

        Args:
            rooms: on rank 0 bytes that tensors of each rank may take, where that is known.
        """
        if self.found and self.example is not None:
            # Where nothing fits into what is left, the first plan is tried.
            waiting = waiting_for("Planning", self.run.module)
            with waiting, suppress(*(DoesNotFitError,) if rooms else ()):
                self.planned = self._plan(self.example, rooms)
        decided = None
        if self.planned is not None:
            decided = self.planned.plan, self.planned.request.schedule
            if self.settings.is_asynchronous:
                # Planned for one mini-batch, or for many in a row, each of them a micro-batch.
                decided = replace(decided[0], num_microbatches=1), ONE_F_ONE_B_ASYNC.name
        return self.joined(*self._agreed(decided))

    def _within_memory(self, pipeline: Pipeline) -> Pipeline:
        """All ranks: planned again if connections (NCCL) and other processes left too little."""
        settings, purpose = self.settings, "comparing the plan with free memory"
        rooms = self.control.gather(room_bytes(self.run.device), purpose)
        lacking = self._lacking(pipeline, rooms)
        may_change = settings.plan is None and settings.cluster is None
        if self._agreed(may_change and len(lacking) > 0):
            pipeline.close()
            pipeline = self._by_plan(rooms)
            rooms = self.control.gather(room_bytes(self.run.device), purpose)
            lacking = self._lacking(pipeline, rooms)
        warn_of_little_room(lacking)
        return pipeline

    def _agreed(self, decided: Any) -> Any:
        """All ranks of all pipelines: what rank 0 of the first one has decided."""
        run = self.run
        if run.peers is not None and self.control.is_leader:
            decided = run.peers.share(decided, "waiting for the plan of the first pipeline")
        return self.control.share(decided, "waiting for rank 0's plan")

    def _plan(self, example: Example, rooms: Sequence[int | None]) -> PlanToRun:
        """Rank 0: the plan."""
        settings, chunked, ways = self.settings, self.chunked, None
        if settings.is_asynchronous:
            settings = replace(settings, per_update=fewest_per_update(self.run.module.trainer))
        if chunked is not None:  # to a planner vertices are samples, chunks micro-batches
            chunks, count = chunked.chunks, len(chunked.chunks)
            settings = replace(settings, num_microbatches=count)
            example = replace(example, minibatch_size=chunks.num_vertices, num_microbatches=count)
            ways = chunked.in_ways if chunks.num_ways > 1 else None
        at_hand = cluster_at_hand(self.found, rooms)
        return plan_pipeline(settings, self.captured, example, at_hand, self.measured, ways)

    def _lacking(
        self, pipeline: Pipeline, rooms: Sequence[int | None]
    ) -> list[tuple[int, int, int]]:
        """Of ranks with less memory than the plan needs: rank, bytes needed and there."""
        if self.planned is None:
            return []
        devices = evaluate_plan(self.planned.plan, self.planned.request).devices
        found = [(pipeline.rank_of_device[each.device], each.memory_bytes) for each in devices]
        at = ((rank, needed, rooms[rank]) for rank, needed in found)
        return [(rank, n, room) for rank, n, room in at if room is not None and n > room]

    def _measured(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], found: Sequence[DeviceAtHand]
    ) -> Measured | None:
        """All ranks: on rank 0 the costs on every kind of device; None elsewhere.

        The first rank of every kind measures on its own device, all at the same time.
        """
        run, control, captured = self.run, self.control, self.captured
        kinds = [each.kind for each in found]
        own: Measured | None = None
        measuring = [kinds.index(kind) for kind in {*kinds}]
        if control.rank in control.share(measuring, "hearing which ranks measure"):
            if all(each.device != run.device for each in captured.inputs(args, kwargs).values()):
                args, kwargs = placed((args, kwargs), run.device)
            if self.chunked is not None:
                costs = chunk_costs(self.chunked, captured.inputs(args, kwargs))
                own = costs, (self.chunked.chunks.describe(),)
            else:
                cache = self.settings.cache
                measure = functools.partial(profile_costs, captured, args, kwargs)
                own = profiled(cache, captured, run.device, measure)
        gathered = control.gather(own, "measuring the model on every kind of device")
        if not gathered:
            return None
        measured, notes = zip(*[each for each in gathered if each is not None], strict=True)
        profiles = tuple(profile for each in measured for profile in each.profiles)
        return Costs(profiles), tuple(dict.fromkeys(itertools.chain(*notes)))

    def joined(self, plan: Plan, schedule: str, first: Pipeline | None = None) -> Pipeline:
        """This rank's part of the pipeline of a plan.

        Args:
            plan: of all ranks.
            schedule: name of the schedule.
            first: the pipeline of another form of call, which has put parameters where they are.
        """
        run, settings, control, graph = self.run, self.settings, self.control, self.captured.graph
        ranks = rank_of_device(plan, control.num_ranks) if first is None else first.rank_of_device
        stages = plan_graph(plan, graph, None if first is None else ranks.index(0))
        if settings.is_asynchronous:
            stages.check_updates()
        codes, readers = self._codes(plan, stages, ranks)
        if first is None:
            partition = Partition(run.module, readers, control, run.device)
        else:
            partition = first.partition
            partition.also_read(readers)
        pipeline = Pipeline(
            self.captured,
            plan,
            schedule,
            stages,
            self.planned,
            ranks,
            partition,
            self._executor(stages, ranks, codes),
            run.module,
            run.recorder,
            chunked=self.chunked,
        )
        if settings.is_emulated:
            asked = None if self.planned is None else (self.planned.plan, self.planned.request)
            executor, scale = pipeline.executor, settings.time_scale
            pipeline.time = Emulation(asked, scale, executor, control, run.waits)
        return pipeline

    def _executor(
        self, stages: PlanGraph, ranks: Sequence[int], codes: dict[int, StageCode]
    ) -> Executor:
        """All ranks: connects them, and makes what runs this one's stages."""
        run, graph = self.run, self.captured.graph
        groups = reduce_groups(stages.stages, stages.devices)
        run.transport.connect(_pairs(stages, ranks, groups))
        summed = {
            tuple(sorted(ranks[d] for d in each.devices))
            for each in groups
            if each.stage is not None
        }
        variations = {name: value.variation for name, value in graph.values.items()}
        timeout_s = self.settings.timeout_s
        sums = ProcessSums(summed, timeout_s, run.device, run.waits, run.num_pipelines)
        return Executor(
            transport=run.transport,
            rank_of_device=ranks,
            stages=codes,
            output_names=graph.outputs,
            cutter=Cutter(graph.batch_dims, variations),
            staying=StayingInputs(graph.staying),
            sums=sums if summed else None,
            timeout_s=timeout_s,
            device=run.device,
        )

    def _codes(
        self, plan: Plan, placed: PlanGraph, ranks: Sequence[int]
    ) -> tuple[dict[int, StageCode], dict[str, set[int]]]:
        """Runnable stages of this rank, and which ranks read which parameter or buffer."""
        captured, rank, prefix = self.captured, self.control.rank, self.settings.prefix
        codes: dict[int, StageCode] = {}
        readers: dict[str, set[int]] = {}
        for stage, devices in enumerate(placed.devices):
            homes = {ranks[device] for device in devices}
            is_loss = stage == plan.num_stages  # a stage that only takes the outputs of replicas
            operators = () if is_loss else plan.stages[stage].operators
            inputs, outputs = _values(captured, placed.stages, stage, operators)
            stage_of = captured.stage if self.chunked is None else self.chunked.stage
            code: StageModule | ChunkStage = stage_of(operators, inputs, outputs)
            if self.settings.compile is not None and operators and isinstance(code, StageModule):
                code.compile(self.settings.compile)
            for name in code.parameter_names:
                readers.setdefault(prefix + name, set()).update(homes)
            for name in code.buffer_names:
                # The user's step may read constant buffers too, so rank 0 keeps them.
                holders = homes if name in captured.changing else homes | {0}
                readers.setdefault(prefix + name, set()).update(holders)
            if rank in homes:
                recompute = not is_loss and plan.stages[stage].recompute
                keep_state = captured.keeper(operators)
                codes[stage] = StageCode(_called(code), inputs, outputs, recompute, keep_state)
        return codes, readers


def _pairs(
    placed: PlanGraph, ranks: Sequence[int], groups: Sequence[ReduceGroup]
) -> set[tuple[int, int]]:
    """Ranks (source, target) between which stages send values, gradients or their sums."""
    found = set()
    for edge in placed.stages.edges:
        sources = (0,) if edge.source == FEED else (ranks[d] for d in placed.devices[edge.source])
        found |= set(itertools.product(sources, (ranks[d] for d in placed.devices[edge.target])))
    for group in groups:
        first, *others = (ranks[device] for device in group.devices)
        found |= {(other, first) for other in others}
    return {pair for a, b in found if a != b for pair in ((a, b), (b, a))}


def _called(stage: StageModule | ChunkStage) -> StageFunction:
    """A stage as the runtime calls it; one of chunks drains, so it has its own weights."""
    if isinstance(stage, ChunkStage):
        return lambda values, call: stage(values, call.chunk, training=call.training)
    return lambda values, call: stage(values, training=call.training, weights=call.weights)


def _values(
    captured: CapturedModel, stages: StageGraph, stage: int, operators: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the values that enter a stage, and of those that others or the loss take from it."""
    inputs = [name for edge in stages.edges if edge.target == stage for name in edge.values]
    made = {v.name for name in operators for v in captured.graph.operator[name].outputs}
    outputs = [name for edge in stages.edges if edge.source == stage for name in edge.values]
    if stage == stages.num_stages - 1:
        outputs += [name for name in captured.graph.outputs if name in made]
    return tuple(dict.fromkeys(inputs)), tuple(dict.fromkeys(outputs))
