"""The pipeline of one fit, validate, test or predict run: built at the first batch, then run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

from lightning_gpp.capture import CapturedModel, StageModule, capture, placed
from lightning_gpp.cost import Costs
from lightning_gpp.graph import StageGraph
from lightning_gpp.planner import Plan, PlanGraph, plan_graph
from lightning_gpp.runtime.emulation.shape_stage import ShapeStage
from lightning_gpp.runtime.executor import ActionRecord, Boundary, Executor
from lightning_gpp.runtime.process_sums import ProcessSums
from lightning_gpp.runtime.stage_run import StageCode
from lightning_gpp.runtime.sums import Ranks
from lightning_gpp.runtime.transport import Transport
from lightning_gpp.runtime.value_pieces import Cutter
from lightning_gpp.schedule import Program, reduce_groups
from lightning_gpp.strategy.control import Control
from lightning_gpp.strategy.devices_at_hand import DeviceAtHand, cluster_at_hand, warn_of_misplaced
from lightning_gpp.strategy.emulation import Emulation, begin_emulation
from lightning_gpp.strategy.emulation_report import EmulationReport
from lightning_gpp.strategy.measuring import measure_kinds
from lightning_gpp.strategy.partition import Partition, ownership
from lightning_gpp.strategy.planning import Example, Planned, plan_pipeline
from lightning_gpp.strategy.settings import Settings
from lightning_gpp.strategy.shape_only import META

CPU = torch.device("cpu")


@dataclass(slots=True)
class Pipeline:
    """The captured, planned and partitioned model on this rank.

    Attributes:
        captured: graph and runnable operators.
        plan: operators of every stage.
        placed: the stages as they run.
        planned: how the plan came about; on rank 0 only.
        rank_of_device: rank of every device of the plan; the loss is on rank 0.
        partition: which rank holds which parameters.
        executor: runs programs on this rank.
        emulation: the emulated devices; None where devices are real.
        last_trained: the program of the last mini-batch that was trained on.
        last_sizes: samples of each of its smallest micro-batches.
    """

    settings: Settings
    captured: CapturedModel
    plan: Plan
    placed: PlanGraph
    planned: Planned | None
    rank_of_device: tuple[int, ...]
    partition: Partition
    executor: Executor
    emulation: Emulation | None = None
    last_trained: Program | None = None
    last_sizes: tuple[int, ...] = ()
    _programs: dict[tuple[int, bool], Program] = field(default_factory=dict)

    def run(
        self, sizes: Sequence[int], *, has_backward: bool, training: bool, boundary: Boundary | None
    ) -> None:
        """Runs one mini-batch.

        Args:
            sizes: samples of each of the smallest micro-batches.
            has_backward: whether to train.
            training: whether modules are in training mode.
            boundary: the user's step, on rank 0.
        """
        program = self.program(len(sizes), has_backward=has_backward)
        if has_backward:
            self.last_trained, self.last_sizes = program, tuple(sizes)
        self.executor.run(program, sizes, training=training, boundary=boundary)

    def emulated(self, sizes: Sequence[int]) -> AbstractContextManager[None]:
        """What a mini-batch that trains runs in: at the pace of emulated devices, if they are."""
        if self.emulation is None:
            return nullcontext()
        if len(sizes) % self.placed.units_at_a_time:
            self.emulation.num_unpaced += 1
            return nullcontext()
        return self.emulation.step(self.executor, self.program(len(sizes), has_backward=True))

    def emulation_report(self) -> EmulationReport | None:
        """All ranks: on rank 0 what emulated steps took; None elsewhere, or if there were none."""
        return None if self.emulation is None else self.emulation.report()

    def program(self, num_microbatches: int, *, has_backward: bool) -> Program:
        """The program for a number of micro-batches; made once."""
        key = (num_microbatches, has_backward)
        if key not in self._programs:
            self._programs[key] = self._new_program(num_microbatches, has_backward=has_backward)
        return self._programs[key]

    def _new_program(self, num_microbatches: int, *, has_backward: bool) -> Program:
        if not has_backward:
            return self.placed.forward_program(num_microbatches)
        if num_microbatches % self.placed.units_at_a_time:
            return self.placed.small_program(num_microbatches, schedule=self.settings.schedule)
        return self.placed.program(num_microbatches, schedule=self.settings.schedule)

    def step_sizes(self, unit_sizes: Sequence[int]) -> list[int]:
        """Samples of each call of the user's step, which goes at the pace of the loss stage."""
        if len(unit_sizes) % self.placed.units_at_a_time:  # a small program
            return list(unit_sizes)
        pace = self.placed.multiples[-1]
        return [sum(unit_sizes[start : start + pace]) for start in range(0, len(unit_sizes), pace)]

    def abort(self, error: BaseException) -> None:
        """Ends the waiting for sums of gradients, and emulated time, with an error."""
        if self.emulation is not None:
            self.emulation.abort(error)
        if self.executor.sums is not None:
            self.executor.sums.abort(error)

    def close(self) -> None:
        """All ranks: gives back what the pipeline needed for its sums."""
        if isinstance(self.executor.sums, ProcessSums):
            self.executor.sums.close()
        if self.emulation is not None:
            self.emulation.close()

    def record(self, on_record: Callable[[ActionRecord], None] | None) -> None:
        """Sets who gets a record of every action; None for nobody."""
        self.executor.on_record = on_record


def pipelined_module(module: nn.Module, name: str | None) -> nn.Module:
    """The module whose forward is pipelined.

    Raises:
        ValueError: there is no sub-module of that name.
    """
    if name is None:
        return module
    try:
        return module.get_submodule(name)
    except AttributeError:
        known = ", ".join(child for child, _ in module.named_children())
        raise ValueError(
            f"GraphPipeStrategy(module={name!r}): {type(module).__name__} has no such sub-module; "
            f"its children are: {known}"
        ) from None


def build_pipeline(
    settings: Settings,
    module: nn.Module,
    example: Example | None,
    *,
    train_modes: dict[str, bool],
    transport: Transport,
    control: Control,
    device: torch.device,
) -> Pipeline:
    """All ranks: captures the model, agrees on a plan and builds this rank's stages.

    Args:
        settings: what the user asked for.
        module: the whole LightningModule.
        example: a micro-batch, known on rank 0.
        train_modes: training flags of the sub-modules while training.
        transport: between the ranks.
        control: between rank 0 and the others.
        device: where this rank's stages run; ``meta`` where tensors have no numbers.
    """
    target = pipelined_module(module, settings.module)
    args, kwargs = control.share(
        None if example is None else (example.args, example.kwargs),
        "waiting for rank 0's first micro-batch",
    )
    args, kwargs = placed((tuple(args), dict(kwargs)), META if device == META else CPU)
    prefix = f"{settings.module}." if settings.module else ""
    captured = capture(
        target,
        args,
        kwargs,
        leaf_modules=settings.leaf_modules,
        blocks=settings.blocks,
        train_modes=_relative(train_modes, settings.module),
    )
    _check_same(captured.fingerprint, control)
    found = control.gather(DeviceAtHand.of(device), "collecting what devices there are")
    measured = None
    is_given = isinstance(settings.costs, Costs)
    if (settings.plan is None or settings.emulated is not None) and not is_given:
        measured = measure_kinds(
            settings,
            captured,
            args,
            kwargs,
            found=found,
            control=control,
            rank=transport.rank,
            device=device,
        )
    planned = (
        None
        if example is None
        else plan_pipeline(settings, captured, example, cluster_at_hand(found), measured, device)
    )
    plan: Plan = control.share(planned and planned.plan, "waiting for rank 0's plan")
    stages = plan_graph(plan, captured.graph)
    ranks = rank_of_device(plan, transport.num_ranks)
    if planned is not None and settings.emulated is None:
        warn_of_misplaced(planned.request.cluster, ranks)
    codes, readers = _codes(settings, captured, plan, stages, ranks, transport.rank, prefix)
    partition = Partition(
        module,
        ownership(module, readers),
        control,
        rank=transport.rank,
        num_ranks=transport.num_ranks,
        device=device,
    )
    executor = Executor(
        transport=transport,
        rank_of_device=ranks,
        stages=codes,
        output_names=captured.graph.outputs,
        cutter=_cutter(captured),
        sums=_sums(stages, ranks, settings.timeout_s, device),
        timeout_s=settings.timeout_s,
    )
    pipeline = Pipeline(settings, captured, plan, stages, planned, ranks, partition, executor)
    if settings.emulated is not None:
        begun = None if planned is None else begin_emulation(settings.emulated, planned)
        pipeline.emulation = Emulation.join(begun, executor, control, _sum_groups(stages, ranks))
    return pipeline


def _cutter(captured: CapturedModel) -> Cutter:
    values = captured.graph.values
    return Cutter(
        {name: tuple(spec.batch_dim for spec in value.tensors) for name, value in values.items()},
        {name: value.variation for name, value in values.items()},
    )


def _sums(
    placed: PlanGraph, ranks: Sequence[int], timeout_s: float, device: torch.device
) -> ProcessSums | None:
    """All ranks: what sums the gradients of replicas."""
    groups = _sum_groups(placed, ranks)
    return ProcessSums(groups, timeout_s, device) if groups else None


def _sum_groups(placed: PlanGraph, ranks: Sequence[int]) -> dict[Ranks, tuple[int, ...]]:
    """Sets of ranks that sum gradients of replicas -> their devices."""
    return {
        tuple(sorted(ranks[device] for device in group.devices)): tuple(group.devices)
        for group in reduce_groups(placed.stages, placed.devices)
        if group.stage is not None
    }


def share_parameters(pipeline: Pipeline, target: nn.Module) -> None:
    """Tells the executor the parameters, once they are in place; for those on several ranks."""
    pipeline.executor.shared = dict(target.named_parameters())


def rank_of_device(plan: Plan, num_ranks: int) -> tuple[int, ...]:
    """Rank of every device: the device of the loss has rank 0, the others follow in order.

    >>> from lightning_gpp.planner import Stage
    >>> rank_of_device(Plan((Stage(0, ("a",), (0,)), Stage(1, ("b",), (1,)))), num_ranks=3)
    (1, 0, 2)
    """
    loss_device = plan.stages[-1].devices[0]
    others = iter(range(1, num_ranks))
    return tuple(0 if device == loss_device else next(others) for device in range(num_ranks))


def _relative(modes: dict[str, bool], module: str | None) -> dict[str, bool]:
    if module is None:
        return modes
    prefix = f"{module}."
    inner = {n.removeprefix(prefix): flag for n, flag in modes.items() if n.startswith(prefix)}
    return inner | {"": modes[module]}


def _check_same(fingerprint: str, control: Control) -> None:
    found = control.gather(fingerprint, "comparing the captured models")
    for rank, other in enumerate(found):
        if other != found[0]:
            raise RuntimeError(
                f"rank {rank} captured another model than rank 0; all ranks must build the same "
                "model and take the same path through its forward"
            )


def _shapes_of(captured: CapturedModel, function: StageModule) -> ShapeStage:
    """A stage of which only the shapes are asked for."""
    return ShapeStage(
        function,
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
    prefix: str,
) -> tuple[dict[int, StageCode], dict[str, set[int]]]:
    """Runnable stages of this rank, and which ranks read which parameter or buffer."""
    codes: dict[int, StageCode] = {}
    readers: dict[str, set[int]] = {}
    changing = {name for operator in captured.graph for name in operator.state}
    for stage, devices in enumerate(placed.devices):
        homes = {ranks[device] for device in devices}
        is_loss = stage == plan.num_stages  # a stage that only takes the outputs of replicas
        operators = () if is_loss else plan.stages[stage].operators
        inputs, outputs = _values(captured, placed.stages, stage, operators)
        function = captured.stage(operators, inputs, outputs)
        for name in function.parameter_names:
            readers.setdefault(prefix + name, set()).update(homes)
        for name in function.buffer_names:
            # The user's step may read constant buffers too, so rank 0 keeps them.
            holders = homes if name in changing else homes | {0}
            readers.setdefault(prefix + name, set()).update(holders)
        if rank in homes:
            recompute = not is_loss and plan.stages[stage].recompute
            is_shape_only = settings.emulated is not None and settings.emulated.is_shape_only
            runs = _shapes_of(captured, function) if is_shape_only and operators else function
            codes[stage] = StageCode(runs, inputs, outputs, recompute)
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
