"""What a rank has while a run lasts whose model is divided by an SPMD program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_gpp.emulation.real_time import RealTime
from lightning_gpp.emulation.spmd import SpmdEmulation
from lightning_gpp.runtime.boundary import Boundary
from lightning_gpp.runtime.collectives.process_collectives import ProcessCollectives
from lightning_gpp.runtime.gradients import GradientStash
from lightning_gpp.spmd.costs.machine import measured_speeds
from lightning_gpp.spmd.operator_graph import SpmdGraph, ValueSource
from lightning_gpp.spmd.placement import Placement
from lightning_gpp.spmd.program import Computation, SpmdProgram
from lightning_gpp.spmd.rules.theory import Theory
from lightning_gpp.spmd.run.interpreter import Interpreter
from lightning_gpp.spmd.run.moves import Shards
from lightning_gpp.spmd.run.operator_calls import written_buffers
from lightning_gpp.strategy.devices.devices_at_hand import (
    DeviceAtHand,
    cluster_at_hand,
    resolve_cluster,
)
from lightning_gpp.strategy.lightning_private import tell_device
from lightning_gpp.strategy.pipelined_run import PipelinedRun
from lightning_gpp.strategy.ranks.messages import Forward
from lightning_gpp.strategy.report import waiting_for
from lightning_gpp.strategy.settings import Settings
from lightning_gpp.strategy.spmd.hap_planner import HapPlanner, machine_of
from lightning_gpp.strategy.spmd.measured_speeds import (
    measure_collectives,
    measure_speeds,
    typical_update,
)
from lightning_gpp.strategy.spmd.sharded import ShardedOptimizer, ShardedPartition
from lightning_gpp.strategy.spmd.spmd_model import (
    ProgramPackage,
    SpmdBoundary,
    SpmdHalves,
    SpmdModel,
)
from lightning_gpp.strategy.state.held_elsewhere import lifted
from lightning_gpp.strategy.state.step_gradients import OwnGradients
from lightning_gpp.strategy.step.pipelined_call import RankCall

ProgramPlanner = Callable[[SpmdGraph, Sequence[float], Mapping[str, Placement] | None], SpmdProgram]
"""Graph, share of every device, and how parameters are stored (None: to be decided) -> program."""

MANY_EXPORTS = 8
"""A warning comes with this many: exporting takes about as long as a hundred small steps."""


@dataclass(frozen=True, slots=True)
class SpmdForward(Forward):
    """A call of a divided forward.

    Attributes:
        export: which one.
        seed: of random numbers.
    """

    export: int = 0
    seed: int = 0


class PartsStash(GradientStash):
    """Gradients of a call, apart; those that user code has cleared in the module are cleared.

    Args:
        parameters: that this rank holds, or has parts of.
        partition: knows which are parts.
    """

    def __init__(self, parameters: Sequence[Parameter], partition: ShardedPartition) -> None:
        super().__init__(parameters)
        self._partition = partition

    def __enter__(self) -> PartsStash:
        self._partition.clear_gradients()
        super().__enter__()
        return self

    def hand_out(self, factor: Tensor | None = None) -> None:
        """Adds the gradients to those that there are."""
        super().hand_out(factor)
        self._partition.show_gradients()


class SpmdRun(PipelinedRun):
    """The connections, the module and the divided model of a rank during one run.

    Args:
        settings: what the user asked for.
        device: of this rank.
        shares: part of every device; None for equal ones.
        planner: makes programs, on rank 0, or the name of one that does.
    """

    def __init__(
        self,
        settings: Settings,
        device: torch.device,
        shares: Sequence[float] | None,
        planner: str | ProgramPlanner,
    ) -> None:
        super().__init__(settings, device)
        num_ranks = self.transport.num_ranks
        self.shares = tuple(shares or (1 / num_ranks,) * num_ranks)
        self.collectives = ProcessCollectives(settings.timeout_s, device, self.waits)
        self.planner: str | ProgramPlanner | None = planner
        self._has_shares = shares is not None
        self.divided: SpmdModel | None = None
        self.time: RealTime[Interpreter] = RealTime()
        if settings.emulated is not None:
            assert settings.cluster is not None, "the accelerator has seen to it"
            cluster = resolve_cluster(settings.cluster, num_ranks)
            machine = machine_of(cluster, None)
            scale = settings.emulated.time_scale
            self.time = SpmdEmulation(scale, cluster.kinds, machine, self.control, self.waits.sleep)
        self._held: list[Parameter] = []
        self._has_trained = False
        self.on_program: Callable[[SpmdProgram], None] = lambda program: None

    @property
    def model(self) -> SpmdModel | None:
        """The divided model, once it is built."""
        return self.divided

    def attach(self, module: pl.LightningModule, optimizers: Sequence[Optimizer]) -> None:
        """Takes the whole module and its optimizers; all ranks time what they are to do with them.

        Args:
            module: with whole parameters.
            optimizers: of these.
        """
        super().attach(module, optimizers)
        if isinstance(self.planner, str):
            self.planner = self._planner(self.planner, optimizers)

    def _planner(self, name: str, optimizers: Sequence[Optimizer]) -> ProgramPlanner | None:
        """All ranks: a planner for the devices that there are or that the user describes."""
        devices = self.control.gather(DeviceAtHand.of(self.device), "collecting the devices")
        chosen, num_ranks = self.settings.cluster, self.transport.num_ranks
        is_data_parallel = name == "data_parallel"
        speeds = times = None
        if chosen is None:
            # Where samples are dealt by the shares that there are, speeds decide nothing; any do
            # beside which a collective's seconds are not lost in rounding.
            speeds = measured_speeds(np.full(num_ranks, 1e12))
            if not is_data_parallel:
                update = typical_update(optimizers, self.device)
                speeds = measure_speeds(self.device, self.collectives, update)
            times = measure_collectives(self.collectives, self.device)
        if not self.control.is_leader:
            return None  # only rank 0 plans
        cluster = cluster_at_hand(devices) if chosen is None else resolve_cluster(chosen, num_ranks)
        return HapPlanner(machine_of(cluster, speeds, times), self._has_shares, is_data_parallel)

    # Building --------------------------------------------------------------------------------

    def plan(self, graph: SpmdGraph) -> SpmdProgram:
        """Rank 0: a program for an export; parameters stay stored as they are."""
        parts = None
        if self.divided is not None:
            prefix = self.divided.prefix
            stored = self.divided.partition.storage
            parts = {n.removeprefix(prefix): p for n, p in stored.items() if n.startswith(prefix)}
        assert callable(self.planner), "rank 0 has one since the module was attached"
        with waiting_for("Planning", self.module):
            program = self.planner(graph, self.shares, parts)
        if parts is None:
            self.shares = program.shares
        elif parts and program.shares != self.shares:
            raise RuntimeError(
                f"the planner dealt {program.shares} where parameters are dealt {self.shares}"
            )
        return program

    def check_is_divided(self, export: int) -> None:
        """Rank 0: whether the first training step's batch is divided.

        Args:
            export: of that step.

        Raises:
            ValueError: nothing of the model can be divided over so many devices, or only samples
                may be, of which there are too few.
        """
        if self._has_trained:
            return
        self._has_trained = True
        assert self.divided is not None
        interpreter, _ = self.divided.interpreters[export]
        graph, num = interpreter.graph, len(self.shares)
        computed = [i for i in interpreter.program.instructions if isinstance(i, Computation)]
        if any(p.is_shard for each in computed for p in each.outputs):
            return
        theory = Theory(graph, num)
        rules = (rule for operator in graph.operators for rule in theory.rules(operator))
        if num > 1 and not any(p.is_shard for rule in rules for p in rule.outputs):
            raise ValueError(
                f"nothing of the model can be divided over {num} devices: samples and every other "
                "dimension that its operators could be divided along have fewer rows than that. "
                f"Use a larger batch, or fewer devices than {num}"
            )
        if isinstance(self.planner, HapPlanner) and self.planner.is_data_parallel:
            raise ValueError(
                "planner='data_parallel' deals the samples of a batch, its tensors' first "
                f"dimension, and here there are none that {num} devices could be dealt: the batch "
                f"has fewer than {num}, or no operator can be divided along them. Use a larger "
                "batch, fewer devices, or planner='hap'"
            )
        rank_zero_info(
            "the program divides nothing: what would move between the devices takes longer than "
            "what they would save; a larger batch, or one device, is better"
        )

    def build(self, example: Any) -> None:
        """All ranks: takes an export over from rank 0, which gives its :class:`ProgramPackage`."""
        package: ProgramPackage = self.control.share(example, "waiting for rank 0's program")
        if self.divided is None:
            with torch.inference_mode(False):  # what moves would be inference tensors
                self._divide(package)
        assert self.divided is not None
        device, constants = self.device, package.constants
        what = package.graph, package.program, self.collectives, device
        there = {name: value.to(device) for name, value in constants.items()}
        self.divided.interpreters.append((Interpreter(*what), there))
        if len(self.divided.interpreters) == MANY_EXPORTS:
            rank_zero_warn(
                f"the forward was called with {MANY_EXPORTS} forms of arguments (sizes, modes), "
                "each of which is captured by itself; pad batches to a few sizes, or use "
                "DataLoader(drop_last=True)"
            )
        self.on_program(package.program)

    def _divide(self, package: ProgramPackage) -> None:
        """The module's parameters become this rank's parts."""
        program, prefix, target = package.program, self.settings.prefix, self.target
        names = [n for n, _ in (*target.named_parameters(), *target.named_buffers())]
        storage = {prefix + name: program.stored(name) for name in names}
        shards = Shards(program.shares)
        partition = ShardedPartition(self.module, storage, shards, self.control, self.device)
        self._held = held = partition.held_parameters()
        optimizers = [ShardedOptimizer.of(each, partition, held) for each in self._optimizers]
        self.partial_optimizers = [*optimizers]
        partition.spread()
        for optimizer in optimizers:
            optimizer.place_state()
        if self.device.type != "cpu":
            tell_device(self.module, self.device)
        self.own_gradients = OwnGradients(partition.held_with_others())
        written = {prefix + name for name in written_buffers(package.graph)}
        elsewhere = {n for n, ranks in partition.owners.holders.items() if ranks != (0,)}
        self.leader_state.settle(frozenset(elsewhere - written))
        self.divided = SpmdModel(partition, self.collectives, prefix, self.time)

    # Calls -----------------------------------------------------------------------------------

    def open_call(self, message: Forward, boundary: Boundary | None) -> RankCall:
        """A call of the forward that backwards may follow; nothing of it runs yet."""
        halves, model = self._halves(message, boundary), self.divided
        assert model is not None
        return RankCall(halves, PartsStash(self._held, model.partition), self._alone_in)

    @contextmanager
    def _alone_in(self, halves: SpmdHalves, is_second: bool) -> Iterator[None]:
        """What a half of a call runs in."""
        with self.time.step(halves.interpreter, is_second=is_second), lifted():
            yield

    def run_forward(self, message: Forward, boundary: Boundary | None) -> None:
        """Runs a call of the forward that no backward follows."""
        halves = self._halves(message, boundary)
        with torch.no_grad(), message.autocast.on(self.device), lifted():
            halves.forward_half()

    def _halves(self, message: Forward, boundary: Boundary | None) -> SpmdHalves:
        assert isinstance(message, SpmdForward) and self.divided is not None
        assert boundary is None or isinstance(boundary, SpmdBoundary)
        partition = self.divided.partition
        for partial in self.partial_optimizers:
            partial.adopt_new_groups(partition, partition.held_parameters)
        partition.agree_on_gradients()
        interpreter, constants = self.divided.interpreters[message.export]
        stored = {
            value.name: partition.stored(self.divided.prefix + value.name)
            for value in interpreter.graph.values
            if value.source in (ValueSource.PARAMETER, ValueSource.BUFFER)
            and value.name not in constants
        }
        return SpmdHalves(interpreter, constants | stored, message.seed, boundary, self.control)

    @contextmanager
    def whole_optimizers(self) -> Iterator[None]:
        """Optimizers have the parameters of one device while the body runs; parts stay parts."""
        with ExitStack() as stack:
            if self.divided is not None:
                partition = self.divided.partition
                held = partition.held_parameters()
                for partial in self.partial_optimizers:
                    stack.enter_context(partial.whole_groups(partition, held))
                stack.enter_context(partition.parts_in_place())
            yield
