"""Builds the pipeline of a run, on all ranks together: capture, costs, plan, this rank's stages."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_gpp.capture import CapturedModel, StageModule, capture, on_host, placed
from lightning_gpp.capture.values.structure import received, sendable
from lightning_gpp.cost import Costs
from lightning_gpp.emulation.emulation import Emulation, begin_emulation
from lightning_gpp.emulation.shapes import ShapeStage
from lightning_gpp.gnn import ChunkedModel, without_caches
from lightning_gpp.gnn.chunked_model import ChunkStage
from lightning_gpp.graph import FEED, StageGraph
from lightning_gpp.planner import Plan, PlanGraph, plan_graph
from lightning_gpp.planner.plan.by_rank import rank_of_device
from lightning_gpp.runtime.executor import Executor
from lightning_gpp.runtime.pieces import Cutter
from lightning_gpp.runtime.processes.peers import Peers
from lightning_gpp.runtime.stage_run import StageCall, StageCode, StageFunction
from lightning_gpp.runtime.staying_inputs import StayingInputs
from lightning_gpp.runtime.sums.process_sums import ProcessSums
from lightning_gpp.runtime.sums.sums import Ranks
from lightning_gpp.runtime.transport.process_transport import ProcessTransport
from lightning_gpp.schedule import ONE_F_ONE_B_ASYNC, reduce_groups
from lightning_gpp.strategy.devices.devices_at_hand import (
    DeviceAtHand,
    cluster_at_hand,
)
from lightning_gpp.strategy.lightning_private import tell_device
from lightning_gpp.strategy.pipeline import Pipeline
from lightning_gpp.strategy.planning.full_graph import GraphCall, model_in_chunks
from lightning_gpp.strategy.planning.measuring import measure_kinds
from lightning_gpp.strategy.planning.planning import Example, Planned, plan_pipeline
from lightning_gpp.strategy.ranks.control import Control
from lightning_gpp.strategy.report import waiting_for
from lightning_gpp.strategy.settings import FullGraph, Settings
from lightning_gpp.strategy.shape_only import META
from lightning_gpp.strategy.state.partition import Partition, ownership
from lightning_gpp.strategy.step.async_refusals import fewest_per_update

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Builder:
    """What a rank builds its part of a pipeline with.

    Attributes:
        settings: what the user asked for.
        module: the whole LightningModule.
        target: the module in it whose forward is pipelined.
        transport: between the ranks.
        control: between rank 0 and the others.
        device: where this rank's stages run; ``meta`` where tensors have no numbers.
        peers: this rank in the other pipelines, of which the first plans for all; None if there
            is one.
    """

    settings: Settings
    module: pl.LightningModule
    target: nn.Module
    transport: ProcessTransport
    control: Control
    device: torch.device
    peers: Peers | None = None

    def build(self, example: Example | None, train_modes: dict[str, bool]) -> Pipeline:
        """All ranks: captures the model, agrees on a plan and builds this rank's stages.

        Args:
            example: a micro-batch, known on rank 0.
            train_modes: training flags of the sub-modules while training.
        """
        args, kwargs = self._shared(example)
        chunked: ChunkedModel | None = None
        if self.settings.full_graph is None:
            captured = self._captured(args, kwargs, train_modes)
        else:
            call = GraphCall.of(self.target, args, kwargs)
            with without_caches(self.target):
                captured = self._captured(call.args, call.kwargs, train_modes)
            chunked = self._in_chunks(self.settings.full_graph, captured, call, train_modes)
            example = example and _of_vertices(example, chunked)
        planned = None
        if self.peers is None or self.peers.pipeline == 0:
            planned = self._planned(captured, args, kwargs, example, chunked)
        plan, schedule = self._agreed(planned)
        pipeline = self._joined(captured, plan, schedule, planned, chunked)
        if chunked is not None:
            self._leave_graph(pipeline, chunked)
        return pipeline

    def _planned(
        self,
        captured: CapturedModel,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        example: Example | None,
        chunked: ChunkedModel | None,
    ) -> Planned | None:
        """All ranks measure what is not known; on rank 0 the plan."""
        settings, ways, measured = self.settings, None, None
        found = self.control.gather(
            DeviceAtHand.of(self.device), "collecting what devices there are"
        )
        if not isinstance(settings.costs, Costs):
            with waiting_for("Measuring the model", self.module):
                measured = measure_kinds(
                    settings,
                    captured,
                    args,
                    kwargs,
                    found=found,
                    control=self.control,
                    device=self.device,
                    chunked=chunked,
                )
        if example is None:
            return None
        if settings.is_asynchronous:
            settings = replace(settings, per_update=fewest_per_update(self.module.trainer))
        if chunked is not None:
            settings = replace(settings, num_microbatches=len(chunked.chunks))
            ways = chunked.in_ways if chunked.chunks.num_ways > 1 else None
        with waiting_for("Planning", self.module):
            return plan_pipeline(
                settings, captured, example, cluster_at_hand(found), measured, self.device, ways
            )

    def _agreed(self, planned: Planned | None) -> tuple[Plan, str]:
        """All ranks of all pipelines: the plan of the first one's rank 0, and its schedule."""
        decided = planned and (planned.plan, planned.request.schedule)
        if planned is not None and self.settings.is_asynchronous:
            # Planned for one mini-batch, or for many in a row, each of them a micro-batch.
            decided = replace(planned.plan, num_microbatches=1), ONE_F_ONE_B_ASYNC.name
        if self.peers is not None and self.control.is_leader:
            decided = self.peers.share(decided, "waiting for the plan of the first pipeline")
        agreed: tuple[Plan, str] = self.control.share(decided, "waiting for rank 0's plan")
        return agreed

    def _leave_graph(self, pipeline: Pipeline, chunked: ChunkedModel) -> None:
        """Stages keep what they read of the graph, which all ranks have seen, and no more."""
        staying, graph, tensors = pipeline.executor.staying, pipeline.placed, chunked.arguments
        read = {name for code in pipeline.executor.stages.values() for name in code.inputs}
        chunked.keep_arguments(read)
        if not self.control.is_leader:
            kept = placed({name: tensors[name] for name in tensors.keys() & read}, self.device)
            for stage in pipeline.executor.stages:
                staying.keep(stage, kept)
            return
        ranks = [pipeline.rank_of_device[devices[0]] for devices in graph.devices]
        for edge in graph.stages.edges:
            if edge.source == FEED and ranks[edge.target] != self.control.rank:
                sent = {name: tensors[name] for name in tensors.keys() & set(edge.values)}
                staying.are_at(edge.target, ranks[edge.target], sent)

    def _shared(self, example: Example | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Rank 0's first micro-batch, on the device where this rank captures the model."""
        told = None
        if example is not None:
            given = tuple(example.args), dict(example.kwargs)
            staying = [] if self.device.type == "cpu" else on_host(given)  # lengths, for example
            told = sendable(placed(given, self._in_messages)), self.device.type, staying
        given, leader_type, staying = self.control.share(
            told, "waiting for rank 0's first micro-batch"
        )
        device = self._captures_on(leader_type)
        if self.device.type not in ("cpu", "meta"):
            tell_device(self.module, device)
        args, kwargs = placed(received(given), device, staying)
        return tuple(args), dict(kwargs)

    @property
    def _in_messages(self) -> torch.device:
        return META if self.device == META else CPU

    def _captures_on(self, leader_type: str) -> torch.device:
        """The device of this rank if it is of rank 0's type: all ranks have to see the same graph.

        A graph that is divided into chunks is in host memory, and so is the model then.
        """
        is_alike = self.device.type == leader_type and self.settings.full_graph is None
        return self.device if is_alike else self._in_messages

    def _captured(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], train_modes: dict[str, bool]
    ) -> CapturedModel:
        settings, verified = self.settings, None
        if not self.control.is_leader:
            verified = self.control.hear("waiting until rank 0 has captured the model")
        with waiting_for("Capturing the model", self.module):
            captured = capture(
                self.target,
                args,
                kwargs,
                leaf_modules=settings.leaf_modules,
                blocks=settings.blocks,
                train_modes=_relative(train_modes, settings.module),
                verified=verified,
            )
            if self.control.is_leader:
                self.control.tell(captured.verified)
            _check_same(captured.fingerprint, self.control, self.peers)
        return captured

    def _in_chunks(
        self,
        asked: FullGraph,
        captured: CapturedModel,
        call: GraphCall,
        train_modes: dict[str, bool],
    ) -> ChunkedModel:
        flags = _relative(train_modes, self.settings.module)
        with waiting_for("Dividing the graph into chunks", self.module):
            chunked = model_in_chunks(
                asked, captured, call.tensors, call.example, flags, self.control
            )
        captured.take_graph(chunked.graph, chunked.in_ways.operators)
        return chunked

    def _joined(
        self,
        captured: CapturedModel,
        plan: Plan,
        schedule: str,
        planned: Planned | None,
        chunked: ChunkedModel | None,
    ) -> Pipeline:
        """This rank's part of the pipeline of a plan."""
        settings, control, transport = self.settings, self.control, self.transport
        stages = plan_graph(plan, captured.graph)
        if settings.is_asynchronous:
            stages.check_updates()
        ranks = rank_of_device(plan, control.num_ranks)
        codes, readers = _codes(settings, captured, plan, stages, ranks, control.rank, chunked)
        partition = Partition(self.module, ownership(self.module, readers), control, self.device)
        groups = _sum_groups(stages, ranks)
        if isinstance(transport, ProcessTransport):
            transport.connect(_pairs(stages, ranks))
        sums = None
        if groups:
            sums = ProcessSums(groups, settings.timeout_s, self.device, transport.waits)
        executor = Executor(
            transport=transport,
            rank_of_device=ranks,
            stages=codes,
            output_names=captured.graph.outputs,
            cutter=_cutter(captured),
            staying=StayingInputs(captured.graph.staying),
            sums=sums,
            timeout_s=settings.timeout_s,
            device=self.device,
        )
        pipeline = Pipeline(captured, plan, schedule, stages, planned, ranks, partition, executor)
        pipeline.chunked = chunked
        if settings.emulated is not None:
            begun = None
            if planned is not None:
                scale, is_shape_only = settings.emulated.time_scale, settings.emulated.is_shape_only
                begun = begin_emulation(
                    planned.plan, planned.request, scale, is_shape_only=is_shape_only
                )
            pipeline.time = Emulation.join(begun, executor, control, transport.waits)
        return pipeline


def _cutter(captured: CapturedModel) -> Cutter:
    values = captured.graph.values
    return Cutter(
        captured.graph.cut_dims,
        {name: value.variation for name, value in values.items()},
    )


def _sum_groups(placed: PlanGraph, ranks: Sequence[int]) -> dict[Ranks, tuple[int, ...]]:
    """Sets of ranks that sum gradients of replicas -> their devices."""
    return {
        tuple(sorted(ranks[device] for device in group.devices)): tuple(group.devices)
        for group in reduce_groups(placed.stages, placed.devices)
        if group.stage is not None
    }


def _pairs(placed: PlanGraph, ranks: Sequence[int]) -> set[tuple[int, int]]:
    """Ranks (source, target) between which stages send values, gradients or their sums."""
    found = set()
    for edge in placed.stages.edges:
        sources = (0,) if edge.source == FEED else (ranks[d] for d in placed.devices[edge.source])
        found |= set(itertools.product(sources, (ranks[d] for d in placed.devices[edge.target])))
    for group in reduce_groups(placed.stages, placed.devices):
        first, *others = (ranks[device] for device in group.devices)
        found |= {(other, first) for other in others}
    return {pair for a, b in found if a != b for pair in ((a, b), (b, a))}


def _relative(modes: dict[str, bool], module: str | None) -> dict[str, bool]:
    if module is None:
        return modes
    prefix = f"{module}."
    inner = {n.removeprefix(prefix): flag for n, flag in modes.items() if n.startswith(prefix)}
    return inner | {"": modes[module]}


def _check_same(fingerprint: str, control: Control, peers: Peers | None) -> None:
    found = control.gather(fingerprint, "comparing the captured models")
    if peers is not None and control.is_leader:
        purpose = "comparing the captured models of pipelines"
        for pipeline, other in enumerate(peers.gather(fingerprint, purpose)):
            if other != fingerprint:
                raise RuntimeError(
                    f"pipeline {pipeline} captured another model than pipeline {peers.pipeline}; "
                    "all must build the same model and take the same path through its forward"
                )
    for rank, other in enumerate(found):
        if other != found[0]:
            raise RuntimeError(
                f"rank {rank} captured another model than rank 0; all ranks must build the same "
                "model and take the same path through its forward"
            )


@dataclass(frozen=True, slots=True)
class _ModuleStage:
    """A stage of the user's modules as the runtime calls it."""

    module: StageModule

    def __call__(self, values: Sequence[Any], call: StageCall) -> Sequence[Any]:
        return self.module(values, training=call.training, weights=call.weights)


@dataclass(frozen=True, slots=True)
class _OnChunks:
    """A stage that runs on chunks of one graph as the runtime calls it."""

    stage: ChunkStage

    def __call__(self, values: Sequence[Any], call: StageCall) -> Sequence[Any]:
        assert call.weights is None  # the pipeline drains
        return self.stage(values, call.chunk, training=call.training)


def _of_vertices(example: Example, chunked: ChunkedModel) -> Example:
    """The example as what a planner asks of it: vertices are samples, chunks are micro-batches."""
    chunks = chunked.chunks
    return replace(example, minibatch_size=chunks.num_vertices, num_microbatches=len(chunks))


def _shapes_of(captured: CapturedModel, function: StageModule) -> ShapeStage:
    """A stage of which only the shapes are asked for."""
    return ShapeStage(
        _ModuleStage(function),
        captured.graph,
        function.inputs,
        function.outputs,
        lambda: [captured.module.get_parameter(name) for name in function.parameter_names],
    )


def _codes(
    settings: Settings,
    captured: CapturedModel,
    plan: Plan,
    placed: PlanGraph,
    ranks: Sequence[int],
    rank: int,
    chunked: ChunkedModel | None,
) -> tuple[dict[int, StageCode], dict[str, set[int]]]:
    """Runnable stages of this rank, and which ranks read which parameter or buffer."""
    codes: dict[int, StageCode] = {}
    readers: dict[str, set[int]] = {}
    changing = captured.changing
    for stage, devices in enumerate(placed.devices):
        homes = {ranks[device] for device in devices}
        is_loss = stage == plan.num_stages  # a stage that only takes the outputs of replicas
        operators = () if is_loss else plan.stages[stage].operators
        inputs, outputs = _values(captured, placed.stages, stage, operators)
        function: StageModule | ChunkStage
        if chunked is None:
            function = captured.stage(operators, inputs, outputs)
        else:
            function = chunked.stage(operators, inputs, outputs, runs=rank in homes)
        if settings.compile is not None and isinstance(function, StageModule) and operators:
            function.compile(settings.compile)
        for name in function.parameter_names:
            readers.setdefault(settings.prefix + name, set()).update(homes)
        for name in function.buffer_names:
            # The user's step may read constant buffers too, so rank 0 keeps them.
            holders = homes if name in changing else homes | {0}
            readers.setdefault(settings.prefix + name, set()).update(holders)
        if rank in homes:
            recompute = not is_loss and plan.stages[stage].recompute
            runs: StageFunction
            if isinstance(function, ChunkStage):
                runs = _OnChunks(function)
            elif settings.is_shape_only and operators:
                runs = _shapes_of(captured, function)
            else:
                runs = _ModuleStage(function)
            keep_state = captured.keeper(operators)
            codes[stage] = StageCode(runs, inputs, outputs, recompute, keep_state)
    return codes, readers


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
