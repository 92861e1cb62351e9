"""Builds this rank's pipeline from a plan: stages, parameters, connections."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from lightning_gpp.capture import CapturedModel, StageModule
from lightning_gpp.emulation.emulation import Emulation
from lightning_gpp.gnn import ChunkedModel
from lightning_gpp.gnn.chunked_model import ChunkStage
from lightning_gpp.graph import FEED, ModelGraph, StageGraph
from lightning_gpp.planner import Plan, PlanGraph, plan_graph
from lightning_gpp.planner.plan.by_rank import rank_of_device
from lightning_gpp.planner.plan_to_run import PlanToRun
from lightning_gpp.runtime.executor import Executor
from lightning_gpp.runtime.pieces import Cutter
from lightning_gpp.runtime.stage_run import StageCode, StageFunction
from lightning_gpp.runtime.staying_inputs import StayingInputs
from lightning_gpp.runtime.sums import ProcessSums
from lightning_gpp.schedule.lower import reduce_groups
from lightning_gpp.schedule.program_parts import ReduceGroup
from lightning_gpp.strategy.pipeline import Pipeline
from lightning_gpp.strategy.pipelined_run import PipelinedRun
from lightning_gpp.strategy.state.partition import Partition


def pipeline_of_plan(
    run: PipelinedRun,
    captured: CapturedModel,
    plan: Plan,
    schedule: str,
    *,
    planned: PlanToRun | None = None,
    chunked: ChunkedModel | None = None,
    first: Pipeline | None = None,
) -> Pipeline:
    """All ranks: this rank's part of the pipeline of a plan.

    Args:
        run: of this rank.
        captured: the model, the same on all ranks.
        plan: of all ranks.
        schedule: name of the schedule.
        planned: on rank 0 how the plan came about, where it was made here.
        chunked: the model in chunks of a graph, if it is.
        first: the pipeline of another form of call, which has put parameters where they are.
    """
    settings, control, graph = run.settings, run.control, captured.graph
    ranks = rank_of_device(plan, control.num_ranks) if first is None else first.rank_of_device
    stages = plan_graph(plan, graph, None if first is None else ranks.index(0))
    if settings.is_asynchronous:
        stages.check_updates()
    codes, readers = _codes(run, captured, chunked, plan, stages, ranks)
    if first is None:
        partition = Partition(run.module, readers, control, run.device)
    else:
        partition = first.partition
        partition.also_read(readers)
    pipeline = Pipeline(
        captured,
        plan,
        schedule,
        stages,
        planned,
        ranks,
        partition,
        _executor(run, graph, stages, ranks, codes),
        run.module,
        run.recorder,
        chunked=chunked,
    )
    if settings.is_emulated:
        asked = None if planned is None else (planned.plan, planned.request)
        executor, scale = pipeline.executor, settings.time_scale
        pipeline.time = Emulation(asked, scale, executor, control, run.waits)
    return pipeline


def _executor(
    run: PipelinedRun,
    graph: ModelGraph,
    stages: PlanGraph,
    ranks: Sequence[int],
    codes: dict[int, StageCode],
) -> Executor:
    """All ranks: connects them, and makes what runs this one's stages."""
    groups = reduce_groups(stages.stages, stages.devices)
    run.transport.connect(_pairs(stages, ranks, groups))
    summed = {
        tuple(sorted(ranks[d] for d in each.devices)) for each in groups if each.stage is not None
    }
    variations = {name: value.variation for name, value in graph.values.items()}
    timeout_s = run.settings.timeout_s
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
    run: PipelinedRun,
    captured: CapturedModel,
    chunked: ChunkedModel | None,
    plan: Plan,
    placed: PlanGraph,
    ranks: Sequence[int],
) -> tuple[dict[int, StageCode], dict[str, set[int]]]:
    """Runnable stages of this rank, and which ranks read which parameter or buffer."""
    rank, prefix = run.control.rank, run.settings.prefix
    codes: dict[int, StageCode] = {}
    readers: dict[str, set[int]] = {}
    for stage, devices in enumerate(placed.devices):
        homes = {ranks[device] for device in devices}
        is_loss = stage == plan.num_stages  # a stage that only takes the outputs of replicas
        operators = () if is_loss else plan.stages[stage].operators
        inputs, outputs = _values(captured, placed.stages, stage, operators)
        stage_of = captured.stage if chunked is None else chunked.stage
        code: StageModule | ChunkStage = stage_of(operators, inputs, outputs)
        if run.settings.compile is not None and operators and isinstance(code, StageModule):
            code.compile(run.settings.compile)
        for name in code.parameter_names:
            readers.setdefault(prefix + name, set()).update(homes)
        for name in code.buffer_names:
            # The user's step may read constant buffers too, so rank 0 keeps them. Those of another
            # form of call stay where the first form put them.
            is_kept = not run.forms and name not in captured.changing
            holders = homes | {0} if is_kept else homes
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
    return lambda values, call: stage.bound(values, call.training, call.weights)(*values)


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
