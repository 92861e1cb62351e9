"""The Lightning strategy: ``Trainer(strategy="graphpipe", devices=N)``."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO, ClusterEnvironment, Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gpp.capture import BlockGraph
from lightning_gpp.graph import StageGraph
from lightning_gpp.planner import PLANNERS, Plan
from lightning_gpp.runtime.executor import ActionRecord
from lightning_gpp.runtime.gradients import GradientStash
from lightning_gpp.runtime.process_transport import ProcessGroupTransport, TransportGroups
from lightning_gpp.runtime.suspend import StepThreads
from lightning_gpp.schedule import SCHEDULES
from lightning_gpp.strategy.control import Control
from lightning_gpp.strategy.failure import FailureWatch
from lightning_gpp.strategy.hooks import HookRelay
from lightning_gpp.strategy.lightning_private import (
    LightningOptimizer,
    MultiProcessingLauncher,
    SubprocessScriptLauncher,
    distributed_is_initialized,
    init_dist_connection,
)
from lightning_gpp.strategy.loaders import RemoteBatch, follow_leader
from lightning_gpp.strategy.logs import replay
from lightning_gpp.strategy.metrics import keep_local
from lightning_gpp.strategy.microbatches import batch_size, cut_batch, microbatch_sizes
from lightning_gpp.strategy.optimizers import PartialOptimizer
from lightning_gpp.strategy.pipeline import (
    Pipeline,
    PlanLike,
    Settings,
    build_pipeline,
    pipelined_module,
    share_parameters,
)
from lightning_gpp.strategy.precision import pipeline_precision
from lightning_gpp.strategy.report import describe_pipeline
from lightning_gpp.strategy.steps import ForwardCall, StepBoundary, first_call

log = logging.getLogger(__name__)

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


class GraphPipeStrategy(ParallelStrategy):
    """Trains an unmodified LightningModule split over devices as a graph of pipeline stages.

    Args:
        num_microbatches: micro-batches that a mini-batch is cut into; by default twice the number
            of devices, or fewer where the batch is smaller.
        schedule: ``"1f1b"`` or ``"gpipe"``.
        planner: name of the planner that makes the plan.
        plan: a plan made by hand instead: a :class:`~lightning_gpp.Plan`, its JSON file, or a list
            with the module names of each stage.
        module: qualified name of the sub-module whose forward is pipelined; by default the
            LightningModule's own forward.
        blocks: the graph of blocks, for a forward that cannot be captured.
        leaf_modules: module types or qualified names that stay one operator each.
        timeout: seconds after which a wait for another rank ends in an error.
        start_method: how processes are started on this host.

    Raises:
        ValueError: unknown schedule or planner (the text lists the known ones), or a number that
            makes no sense.
    """

    def __init__(
        self,
        num_microbatches: int | None = None,
        schedule: str = "1f1b",
        planner: str = "balanced",
        plan: PlanLike | None = None,
        module: str | None = None,
        *,
        blocks: BlockGraph | None = None,
        leaf_modules: Sequence[type | str] = (),
        timeout: float = 1800.0,
        start_method: StartMethod = "popen",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        _check_name("schedule", schedule, SCHEDULES)
        _check_name("planner", planner, PLANNERS)
        if num_microbatches is not None and num_microbatches < 1:
            raise ValueError(f"num_microbatches must be at least 1, got {num_microbatches}")
        if timeout <= 0:
            raise ValueError(f"timeout is in seconds and must be positive, got {timeout}")
        self.settings = Settings(
            num_microbatches=num_microbatches,
            schedule=schedule,
            planner=planner,
            plan=plan,
            module=module,
            blocks=blocks,
            leaf_modules=tuple(leaf_modules),
            timeout_s=timeout,
        )
        self.plan: Plan | None = None
        self.stage_graph: StageGraph | None = None
        self.on_record: Callable[[ActionRecord], None] | None = None
        self.num_nodes = 1
        self._start_method = start_method
        self._transport: ProcessGroupTransport | None = None
        self._control: Control | None = None
        self._failures: FailureWatch | None = None
        self._pipeline: Pipeline | None = None
        self._partial_optimizers: list[PartialOptimizer] = []
        self._stash: GradientStash | None = None
        self._hooks: HookRelay | None = None
        self._threads = StepThreads()
        self._train_modes: dict[str, bool] = {}
        self._trainer: pl.Trainer | None = None

    # Places and processes --------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """False: there is one data-parallel replica, so Lightning must not split the data."""
        return False

    @property
    def root_device(self) -> torch.device:
        """Device of this rank's stages."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks on this host."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """One replica: nothing to split."""
        return {"num_replicas": 1, "rank": 0}

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self._start_method == "popen":
            self._launcher = SubprocessScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )
        else:
            self._launcher = MultiProcessingLauncher(self, start_method=self._start_method)

    def set_world_ranks(self) -> None:
        """Tells the cluster environment who this rank is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(
                self.node_rank * self.num_processes + self.local_rank
            )
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def setup_environment(self) -> None:
        """Joins the processes."""
        super().setup_environment()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        backend = "gloo" if self.root_device.type == "cpu" else "cpu:gloo,cuda:nccl"
        timeout = timedelta(seconds=self.settings.timeout_s)
        init_dist_connection(self.cluster_environment, backend, timeout=timeout)
        groups = TransportGroups.create("gloo" if self.root_device.type == "cpu" else "nccl")
        self._transport = ProcessGroupTransport(groups, self.root_device)
        self._control = Control(self._transport, self.settings.timeout_s)
        self._failures = FailureWatch(self.cluster_environment.main_address, self._transport.abort)

    # Setting up and tearing down -------------------------------------------------------------

    def setup(self, trainer: pl.Trainer) -> None:
        """Prepares what does not need data; the pipeline is built at the first batch."""
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        self._trainer = trainer
        module = self._module()
        pipelined_module(module, self.settings.module)
        self.model = self.precision_plugin.convert_module(self.model)
        self._train_modes = {name: part.training for name, part in module.named_modules()}
        if trainer.state.fn == TrainerFn.FITTING:
            if not module.automatic_optimization:
                raise NotImplementedError(
                    "manual optimization does not work with the graphpipe strategy yet; let "
                    "training_step return the loss (automatic_optimization = True)"
                )
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        _ignore_sync_dist_advice()
        keep_local(module)
        self._hooks = HookRelay(module, self._known_control(), self._known_failures())
        self._hooks.install()

    def model_to_device(self) -> None:
        """Nothing: a rank's parameters move when the pipeline is built."""

    def teardown(self) -> None:
        """Makes the module whole again and closes the connections."""
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
        if self._transport is not None:
            if self._known_failures().has_failed:
                self._known_failures().close()
                self._transport.hang_up()
            else:
                with self._known_failures().guard():
                    self._finish()
        self._forget_pipeline()
        self.precision_plugin.teardown()
        assert self.accelerator is not None and self.cluster_environment is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        self.cluster_environment.teardown()

    def _finish(self) -> None:
        """All ranks, in good order: whole weights and optimizers, then goodbye."""
        assert self._transport is not None
        if self._pipeline is not None:
            values = self._pipeline.partition.whole_values()
            states = [p.whole_state_dict(self._known_control()) for p in self._partial_optimizers]
            partition = self._pipeline.partition
            partition.make_whole(values)
            if not isinstance(self._launcher, MultiProcessingLauncher):
                # The user's script goes on on every rank.
                values = self._known_control().share(
                    partition.values() if self.is_global_zero else {},
                    "waiting for the trained weights",
                )
                partition.make_whole(values)
            if self.is_global_zero:
                self._module().cpu()
                for optimizer, state in zip(self._partial_optimizers, states, strict=True):
                    optimizer.make_whole(self._module(), state)
        self.barrier("teardown")
        self._known_failures().close()
        self._transport.close()

    def _forget_pipeline(self) -> None:
        self._threads.close()
        self._pipeline = None
        self._partial_optimizers = []
        self._stash = None
        self._transport = None
        self._control = None
        self._failures = None

    def on_exception(self, exception: BaseException) -> None:
        """Ends the other ranks too; an error that only echoes another rank's becomes that one."""
        failures = self._failures
        if failures is not None:
            first = failures.origin(exception)
            if first is not None:
                self.teardown()
                raise first from exception

    # Steps -----------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a mini-batch forward and backward; the returned loss hands the gradients out."""
        with self.precision_plugin.train_step_context():
            return self._step("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a mini-batch forward."""
        with self.precision_plugin.val_step_context():
            return self._step("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a mini-batch forward."""
        with self.precision_plugin.test_step_context():
            return self._step("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a mini-batch forward."""
        with self.precision_plugin.predict_step_context():
            return self._step("predict_step", *args, **kwargs)

    def _step(self, name: str, batch: Any, *args: Any, **kwargs: Any) -> Any:
        control = self._known_control()
        with self._known_failures().guard():
            if control.is_leader:
                result, calls = self._lead(name, batch, args, kwargs)
            else:
                result, calls = self._follow(name)
            replay(self._module(), calls)
        return result

    def _lead(
        self, name: str, batch: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        module, control = self._module(), self._known_control()
        num_samples = batch_size(batch)
        step = getattr(module, name)

        def boundary_of(sizes: Sequence[int]) -> StepBoundary:
            return StepBoundary(
                module,
                pipelined_module(module, self.settings.module),
                lambda microbatch: step(microbatch, *args, **kwargs),
                name=name,
                microbatches=cut_batch(batch, sizes),
                sizes=sizes,
                is_training=name == "training_step",
                threads=self._threads,
            )

        if self._pipeline is None:
            units = self._unit_sizes(num_samples)
            self._build(first_call(module, boundary_of(units)), len(units))
        assert self._pipeline is not None
        units = self._unit_sizes(num_samples)
        control.tell(units)
        boundary = boundary_of(self._pipeline.step_sizes(units))
        boundary.captured = self._pipeline.captured
        with boundary.active():
            stash = self._run(units, name, boundary)
        result, calls = boundary.result(), boundary.log_calls()
        if stash is None:
            control.tell((None, calls))
            return result, calls
        value = result["loss"] if isinstance(result, Mapping) else result
        control.tell((value, calls))
        loss = stash.loss(value)
        return ({**result, "loss": loss} if isinstance(result, Mapping) else loss), calls

    def _follow(self, name: str) -> tuple[Any, Any]:
        control = self._known_control()
        if self._pipeline is None:
            self._build(None, 0)
        units = control.hear(f"waiting for rank 0 to begin {name}")
        stash = self._run(units, name, None)
        value, calls = control.hear(f"waiting for the result of {name}")
        return (None if stash is None else stash.loss(value.to(self.root_device))), calls

    def _run(
        self, units: Sequence[int], name: str, boundary: StepBoundary | None
    ) -> GradientStash | None:
        assert self._pipeline is not None
        self._pipeline.record(self.on_record)
        training = self._module().training
        if name != "training_step":
            self._pipeline.run(units, has_backward=False, training=training, boundary=boundary)
            return None
        assert self._stash is not None
        with self._stash, torch.enable_grad():
            self._pipeline.run(units, has_backward=True, training=training, boundary=boundary)
        return self._stash

    def _unit_sizes(self, num_samples: int) -> list[int]:
        """Samples of each of the smallest micro-batches of a mini-batch."""
        asked = self.settings.num_microbatches
        if asked is not None and num_samples < asked and self._pipeline is None:
            raise ValueError(
                f"a mini-batch of {num_samples} samples cannot be cut into "
                f"num_microbatches={asked}; use a larger batch or fewer micro-batches"
            )
        count = min(asked or 2 * self.world_size, num_samples)
        at_a_time = 1 if self._pipeline is None else self._pipeline.largest_multiple
        if count < at_a_time:
            raise ValueError(
                f"a mini-batch of {num_samples} samples is smaller than the {at_a_time} "
                "micro-batches that a stage of the plan takes at a time; drop small last batches "
                "(drop_last=True)"
            )
        return microbatch_sizes(num_samples, count - count % at_a_time)

    def _build(self, call: ForwardCall | None, num_microbatches: int) -> None:
        """All ranks: captures, plans, partitions. Rank 0 gives the example and the number."""
        module = self._module()
        if module.training:
            self._train_modes = {name: part.training for name, part in module.named_modules()}
        assert self._transport is not None
        pipeline = build_pipeline(
            self.settings,
            module,
            call,
            num_microbatches=num_microbatches,
            train_modes=self._train_modes,
            transport=self._transport,
            control=self._known_control(),
            device=self.root_device,
        )
        held = pipeline.partition.held_parameters()
        self._partial_optimizers = [
            PartialOptimizer.keep(_plain(optimizer), module, held) for optimizer in self.optimizers
        ]
        pipeline.partition.spread()
        share_parameters(pipeline, pipelined_module(module, self.settings.module))
        self._stash = GradientStash(held)
        self._pipeline = pipeline
        self.plan, self.stage_graph = pipeline.plan, pipeline.stages
        if self.is_global_zero:
            rank_zero_info(describe_pipeline(pipeline, num_microbatches))

    # Data ------------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: object) -> object:
        """Rank 0 reads the user's loader, the others follow."""
        with self._known_failures().guard():
            return follow_leader(dataloader, self._known_control(), self._known_failures())

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Moves a batch where there is one."""
        if isinstance(batch, RemoteBatch):
            return batch
        return super().batch_to_device(batch, device, dataloader_idx)

    # Optimizers and checkpoints --------------------------------------------------------------

    @property
    def precision_plugin(self) -> Precision:
        """The precision in use, with gradient clipping over all ranks."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = pipeline_precision(precision_plugin, self)

    def counted_parameters(self) -> list[nn.Parameter] | None:
        """Parameters that count on this rank, each on one; None before the pipeline is built."""
        return None if self._pipeline is None else self._pipeline.partition.counted_parameters()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """All ranks: on rank 0 the state dict of the whole module."""
        module = self._module()
        if self._pipeline is None:
            return module.state_dict()
        with self._known_failures().guard():
            partition = self._pipeline.partition
            partition.make_whole(partition.whole_values())
            state = module.state_dict()
            partition.make_partial()
        return state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """All ranks: on rank 0 the state that one device would write."""
        optimizer = _plain(optimizer)
        for partial_optimizer in self._partial_optimizers:
            if partial_optimizer.optimizer is optimizer:
                with self._known_failures().guard():
                    return partial_optimizer.whole_state_dict(self._known_control())
        return optimizer.state_dict()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Rank 0 writes; hyper-parameters may hold the module itself, so hooks step aside."""
        hooks = self._hooks
        if hooks is not None:
            hooks.remove()
        try:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        finally:
            if hooks is not None:
                hooks.install()

    # Collectives -----------------------------------------------------------------------------

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for all ranks."""
        if distributed_is_initialized():
            with self._guarded():
                dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """One rank's object on all ranks."""
        if not distributed_is_initialized():
            return obj
        objects = [obj]
        with self._guarded():
            dist.broadcast_object_list(objects, src)
        return objects[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces over data-parallel replicas. There is one, so the tensor stays as it is."""
        return tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gathers over data-parallel replicas. There is one, so the tensor stays as it is."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all (or any) ranks say yes."""
        if not distributed_is_initialized():
            return decision
        votes = torch.tensor(int(decision))
        with self._guarded():
            dist.all_reduce(votes)
        return int(votes) == dist.get_world_size() if all else bool(votes)

    # ---------------------------------------------------------------------------------------------

    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def _guarded(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._failures is None else self._failures.guard()

    def _known_control(self) -> Control:
        assert self._control is not None, "the strategy's environment is not set up"
        return self._control

    def _known_failures(self) -> FailureWatch:
        assert self._failures is not None, "the strategy's environment is not set up"
        return self._failures

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers ``graphpipe`` and its forms by start method, as DDP has them."""
        for name, start_method in START_METHODS.items():
            strategy_registry.register(
                name,
                cls,
                description=f"Graph pipeline parallelism, processes started by {start_method!r}",
                start_method=start_method,
            )


START_METHODS: dict[str, StartMethod] = {
    "graphpipe": "popen",
    "graphpipe_spawn": "spawn",
    "graphpipe_fork": "fork",
    "graphpipe_notebook": "fork",
}
"""Registered strategy names and how each starts its processes."""


def _ignore_sync_dist_advice() -> None:
    """Silences Lightning's advice to reduce logged values: they are equal on all ranks already."""
    warnings.filterwarnings("ignore", message="It is recommended to use `self.log")


def _plain(optimizer: Optimizer) -> Optimizer:
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def _check_name(what: str, name: str, known: Mapping[str, Any]) -> None:
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}; known {what}s: {', '.join(known)}")
