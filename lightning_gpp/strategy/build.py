"""Builds the pipeline of a run, on all ranks together: capture, costs, plan, this rank's stages."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lightning_gpp.capture import (
    CapturedModel,
    StageModule,
    capture,
    on_host,
    placed,
    profile_costs,
)
from lightning_gpp.capture.values.structure import received, sendable
from lightning_gpp.common.mapped_tensor import freed_at_once, is_mapped
from lightning_gpp.common.without_collection import collecting_only_new
from lightning_gpp.cost import Costs
from lightning_gpp.emulation.emulation import Emulation, begin_emulation
from lightning_gpp.gnn import ChunkedModel, chunk_costs, without_caches
from lightning_gpp.gnn.chunked_model import ChunkStage
from lightning_gpp.graph import FEED, StageGraph
from lightning_gpp.planner import Plan, PlanGraph, plan_graph
from lightning_gpp.planner.plan.by_rank import rank_of_device
from lightning_gpp.runtime.executor import Executor
from lightning_gpp.runtime.pieces import Cutter
from lightning_gpp.runtime.stage_run import StageCode, StageFunction
from lightning_gpp.runtime.staying_inputs import StayingInputs
from lightning_gpp.runtime.sums.sums import ProcessSums
from lightning_gpp.schedule import ONE_F_ONE_B_ASYNC
from lightning_gpp.schedule.lower import reduce_groups
from lightning_gpp.schedule.program_parts import ReduceGroup
from lightning_gpp.strategy.devices.devices_at_hand import (
    DeviceAtHand,
    cluster_at_hand,
)
from lightning_gpp.strategy.lightning_private import tell_device
from lightning_gpp.strategy.logging.logs import LedLog, recording
from lightning_gpp.strategy.pipeline import Pipeline
from lightning_gpp.strategy.pipelined_run import PipelinedRun, modes_of
from lightning_gpp.strategy.planning.example import GraphCall, model_in_chunks
from lightning_gpp.strategy.planning.planning import Example, Measured, Planned, plan_pipeline
from lightning_gpp.strategy.planning.profile_cache import ProfileCache
from lightning_gpp.strategy.refusals import fewest_per_update
from lightning_gpp.strategy.report import waiting_for
from lightning_gpp.strategy.settings import Settings
from lightning_gpp.strategy.shape_only import META
from lightning_gpp.strategy.state.held_elsewhere import lifted
from lightning_gpp.strategy.state.optimizers import PartialOptimizer
from lightning_gpp.strategy.state.partition import Partition, ownership

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
            run.train_modes = modes_of(run.module)
        logged = LedLog(run.module, makes_calls=False)
        with recording(run.module, logged), torch.enable_grad(), lifted():
            pipeline = _built(run, example)
        if calls := logged.calls():
            raise RuntimeError(
                f"forward logs {calls[0].name!r}, which a pipelined forward cannot: it is captured "
                "once and runs on several ranks. Return the value and log it in the step."
            )
        run.take(
            pipeline,
            lambda optimizer, held: PartialOptimizer.keep(optimizer, run.module, held),
            [run.settings.prefix + name for name in pipeline.captured.changing],
        )


def _built(run: PipelinedRun, example: Example | None) -> Pipeline:
    prefix, full_graph = run.settings.prefix, run.settings.full_graph
    train_modes = {
        name.removeprefix(prefix): flag
        for name, flag in run.train_modes.items()
        if name.startswith(prefix)
    }
    if run.settings.module is not None:
        train_modes[""] = run.train_modes[run.settings.module]
    args, kwargs = _shared(run, example)
    chunked: ChunkedModel | None = None
    if full_graph is None:
        captured = _captured(run, args, kwargs, train_modes)
    else:
        call = GraphCall.of(run.target, args, kwargs)
        with without_caches(run.target):
            captured = _captured(run, call.args, call.kwargs, train_modes)
        with waiting_for("Dividing the graph into chunks", run.module):
            chunked = model_in_chunks(full_graph, captured, call, train_modes, run.control)
        captured.take_graph(chunked.graph, chunked.in_ways.operators)
        if example is not None:  # to a planner vertices are samples, chunks micro-batches
            chunks = chunked.chunks
            example = replace(
                example, minibatch_size=chunks.num_vertices, num_microbatches=len(chunks)
            )
    planned = None
    if run.peers is None or run.peers.pipeline == 0:
        planned = _planned(run, captured, args, kwargs, example, chunked)
    decided = planned and (planned.plan, planned.request.schedule)
    if planned is not None and run.settings.is_asynchronous:
        # Planned for one mini-batch, or for many in a row, each of them a micro-batch.
        decided = replace(planned.plan, num_microbatches=1), ONE_F_ONE_B_ASYNC.name
    if run.peers is not None and run.control.is_leader:
        decided = run.peers.share(decided, "waiting for the plan of the first pipeline")
    plan, schedule = run.control.share(decided, "waiting for rank 0's plan")
    pipeline = _joined(run, captured, plan, schedule, planned, chunked)
    if chunked is not None:  # stages keep what they read of the graph, and no more
        codes = pipeline.executor.stages.values()
        chunked.keep_arguments({name for code in codes for name in code.inputs})
    return pipeline


def _planned(
    run: PipelinedRun,
    captured: CapturedModel,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    example: Example | None,
    chunked: ChunkedModel | None,
) -> Planned | None:
    """All ranks measure what is not known; on rank 0 the plan."""
    settings, ways, measured = run.settings, None, None
    found = run.control.gather(DeviceAtHand.of(run.device), "collecting what devices there are")
    if not isinstance(settings.costs, Costs):
        with waiting_for("Measuring the model", run.module):
            measured = _measured(run, captured, args, kwargs, found, chunked)
    if example is None:
        return None
    if settings.is_asynchronous:
        settings = replace(settings, per_update=fewest_per_update(run.module.trainer))
    if chunked is not None:
        settings = replace(settings, num_microbatches=len(chunked.chunks))
        ways = chunked.in_ways if chunked.chunks.num_ways > 1 else None
    with waiting_for("Planning", run.module):
        return plan_pipeline(
            settings, captured, example, cluster_at_hand(found), measured, run.device, ways
        )


def _measured(
    run: PipelinedRun,
    captured: CapturedModel,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    found: Sequence[DeviceAtHand],
    chunked: ChunkedModel | None,
) -> Measured | None:
    """All ranks: on rank 0 the costs on every kind of device; None elsewhere.

    The first rank of every kind measures on its own device, all at the same time.
    """
    kinds = [each.kind for each in found]
    own: Measured | None = None
    measuring = [kinds.index(kind) for kind in {*kinds}]
    if run.control.rank in run.control.share(measuring, "hearing which ranks measure"):
        inputs = captured.inputs(args, kwargs)
        if all(tensor.device != run.device for tensor in inputs.values()):
            args, kwargs = placed((tuple(args), dict(kwargs)), run.device)
        if chunked is not None:
            costs = chunk_costs(chunked, captured.inputs(args, kwargs))
            own = costs, (chunked.describe(),)
        else:
            own = ProfileCache(run.settings.cache).costs(
                captured, run.device, lambda: profile_costs(captured, args, kwargs)
            )
    gathered = run.control.gather(own, "measuring the model on every kind of device")
    if not gathered:
        return None
    measured = [each for each in gathered if each is not None]
    profiles = tuple(profile for costs, _ in measured for profile in costs.profiles)
    return Costs(profiles), tuple(dict.fromkeys(note for _, notes in measured for note in notes))


def _shared(run: PipelinedRun, example: Example | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Rank 0's first micro-batch, on the device where this rank captures the model.

    That is the rank's own if it is of rank 0's type: all ranks have to see the same graph. One that
    is divided into chunks is in host memory, and so is the model then.
    """
    told, in_messages = None, META if run.device == META else CPU
    if example is not None:
        given = tuple(example.args), dict(example.kwargs)
        staying = [] if run.device.type == "cpu" else on_host(given)  # lengths, for example
        told = sendable(placed(given, in_messages)), run.device.type, staying
    given, leader_type, staying = run.control.share(told, "waiting for rank 0's first micro-batch")
    is_alike = run.device.type == leader_type and run.settings.full_graph is None
    device = run.device if is_alike else in_messages
    if run.device.type not in ("cpu", "meta"):
        tell_device(run.module, device)
    args, kwargs = placed(received(given), device, staying)
    return tuple(args), dict(kwargs)


def _captured(
    run: PipelinedRun, args: Sequence[Any], kwargs: Mapping[str, Any], train_modes: dict[str, bool]
) -> CapturedModel:
    settings, verified = run.settings, None
    if not run.control.is_leader:
        verified = run.control.hear("waiting until rank 0 has captured the model")
    with waiting_for("Capturing the model", run.module):
        captured = capture(
            run.target,
            args,
            kwargs,
            leaf_modules=settings.leaf_modules,
            blocks=settings.blocks,
            train_modes=train_modes,
            verified=verified,
        )
        if run.control.is_leader:
            run.control.tell(captured.verified)
        _check_same(run, captured.fingerprint)
    return captured


def _joined(
    run: PipelinedRun,
    captured: CapturedModel,
    plan: Plan,
    schedule: str,
    planned: Planned | None,
    chunked: ChunkedModel | None,
) -> Pipeline:
    """This rank's part of the pipeline of a plan."""
    settings, control, transport = run.settings, run.control, run.transport
    stages = plan_graph(plan, captured.graph)
    if settings.is_asynchronous:
        stages.check_updates()
    ranks = rank_of_device(plan, control.num_ranks)
    codes, readers = _codes(settings, captured, plan, stages, ranks, control.rank, chunked)
    partition = Partition(run.module, ownership(run.module, readers), control, run.device)
    groups = reduce_groups(stages.stages, stages.devices)
    transport.connect(_pairs(stages, ranks, groups))
    summed = {
        tuple(sorted(ranks[device] for device in group.devices)): tuple(group.devices)
        for group in groups
        if group.stage is not None
    }
    timeout_s, pipelines = settings.timeout_s, run.num_pipelines
    sums = ProcessSums(summed, timeout_s, run.device, run.waits, pipelines)
    executor = Executor(
        transport=transport,
        rank_of_device=ranks,
        stages=codes,
        output_names=captured.graph.outputs,
        cutter=Cutter(
            captured.graph.cut_dims,
            {name: value.variation for name, value in captured.graph.values.items()},
        ),
        staying=StayingInputs(captured.graph.staying),
        sums=sums if summed else None,
        timeout_s=settings.timeout_s,
        device=run.device,
    )
    pipeline = Pipeline(
        captured,
        plan,
        schedule,
        stages,
        planned,
        ranks,
        partition,
        executor,
        run.module,
        run.recorder,
        chunked=chunked,
    )
    if settings.emulated is not None:
        begun, emulated = None, settings.emulated
        if planned is not None:
            begun = begin_emulation(
                planned.plan,
                planned.request,
                emulated.time_scale,
                is_shape_only=emulated.is_shape_only,
            )
        pipeline.time = Emulation(begun, executor, control, run.waits)
    return pipeline


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


def _check_same(run: PipelinedRun, fingerprint: str) -> None:
    """All ranks of all pipelines: they have captured the same model."""
    found = run.control.gather(fingerprint, "comparing the captured models")
    others = [("rank", rank, each) for rank, each in enumerate(found)]
    if run.peers is not None and run.control.is_leader:
        of_peers = run.peers.gather(fingerprint, "comparing the captured models of pipelines")
        others += [("pipeline", pipeline, each) for pipeline, each in enumerate(of_peers)]
    for kind, number, other in others:
        if other != fingerprint:
            own = run.peers.pipeline if kind == "pipeline" and run.peers is not None else 0
            raise RuntimeError(
                f"{kind} {number} captured another model than {kind} {own}; all {kind}s must build "
                "the same model and take the same path through its forward"
            )


def _of_modules(stage: StageModule) -> StageFunction:
    """A stage of the user's modules as the runtime calls it."""
    return lambda values, call: stage(values, training=call.training, weights=call.weights)


def _of_chunks(stage: ChunkStage) -> StageFunction:
    """A stage that runs on chunks of one graph; its pipeline drains, so it has its own weights."""
    return lambda values, call: stage(values, call.chunk, training=call.training)


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
                runs = _of_chunks(function)
            else:
                runs = _of_modules(function)
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
