"""The Lightning strategy: ``Trainer(strategy="graphpipe", devices=N)``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO, ClusterEnvironment, Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gpp.capture import BlockGraph
from lightning_gpp.common.checks import check_whole
from lightning_gpp.common.instance_attribute import instance_attribute
from lightning_gpp.common.mapped_tensor import freed_at_once, mapping_modules
from lightning_gpp.emulation.report import EmulationReport
from lightning_gpp.graph import StageGraph
from lightning_gpp.planner import GRAPHPIPE, Plan
from lightning_gpp.runtime.run_state import ActionRecord
from lightning_gpp.schedule import ONE_F_ONE_B_ASYNC
from lightning_gpp.strategy import refusals
from lightning_gpp.strategy.devices.devices_at_hand import ClusterLike
from lightning_gpp.strategy.lightning_private import SIGTERMException, signals_answered_by_all
from lightning_gpp.strategy.logging.logs import compute_alike
from lightning_gpp.strategy.ranks.pipelines import StartMethod
from lightning_gpp.strategy.refusals import (
    check_name,
    check_settings,
    compile_options,
    refuse_callbacks,
    refuse_for_async,
)
from lightning_gpp.strategy.report import PlanReports, show, width
from lightning_gpp.strategy.settings import (
    CacheLike,
    CostsLike,
    PlanLike,
    Report,
    Settings,
    resolve_costs,
)
from lightning_gpp.strategy.state.callbacks import count_pipelines, finetuning_hooks
from lightning_gpp.strategy.state.held_elsewhere import ONLY_SOME
from lightning_gpp.strategy.state.precision import pipeline_precision, place_precision
from lightning_gpp.strategy.state.saving import SavingStrategy, StateDictType, plain
from lightning_gpp.strategy.state.without_values import give_values
from lightning_gpp.strategy.step.hooks import LedHooks
from lightning_gpp.strategy.step.loaders import PlacedBatch, RemoteBatch, as_long_as_leaders

_ASYNC = ONE_F_ONE_B_ASYNC.name


class GraphPipeStrategy(SavingStrategy):
    """Trains an unmodified LightningModule split over devices as a graph of pipeline stages.

    Args:
        num_microbatches: micro-batches that a mini-batch is cut into; by default the planner
            chooses.
        schedule: ``"gpipe"``, which holds the activations of all micro-batches and is exact for
            every loss, or ``"1f1b"``, which holds few of them and runs the step once per
            micro-batch, so that the loss has to be a mean over samples. By default ``"gpipe"``
            where a plan fits into memory with it, else ``"1f1b"``, and the report says so;
            ``"fastest"`` takes ``"1f1b"`` also where that is predicted to be more than 5 % faster.
            ``"1f1b-async"`` keeps the pipeline full across steps: batches in flight meet weights
            that change meanwhile, as ``weights`` says.
        planner: name of the planner that makes the plan; by default ``"graphpipe"``.
        plan: a plan made by hand instead: a :class:`~lightning_gpp.Plan`, its JSON file, or a list
            with the module names of each stage.
        module: qualified name of the sub-module whose forward is pipelined; by default the
            LightningModule's own forward or, if it has none, that of its one child with parameters.
        blocks: the graph of blocks, for a forward that cannot be captured.
        leaf_modules: module types or qualified names that stay one operator each.
        cluster: what the planner takes the devices and links for, one device per rank in the order
            of the ranks: a :class:`~lightning_gpp.cluster.Cluster`, a preset (``"dgx_a100"``) or a
            file. By default the devices at hand with their memory, and links as is common.
        cache: whether profiles are kept and found again by content; a folder to keep them in. The
            default folder is the one that the environment variable LIGHTNING_GPP_CACHE names
            (empty: none), or the platform's for caches.
        costs: what to plan with: :class:`~lightning_gpp.cost.Costs` instead of a measurement, or
            a :class:`~lightning_gpp.simulate.Refit` of recorded steps, which corrects it; or a file
            that holds either, such as the ``refit.json`` of
            :class:`~lightning_gpp.strategy.TimelineCallback`.
        use_all_devices: whether a plan that leaves devices idle, as it is predicted to be faster on
            fewer, gives way to the fastest plan found that uses all.
        weights: with ``schedule="1f1b-async"``: with which weights forwards and backwards run
            (:data:`lightning_gpp.weights.policies.POLICIES`); by default ``"pipeoptim"``, which
            predicts those that the backward will meet.
        state_dict_type: what a checkpoint is: ``"full"``, an ordinary file for which rank 0 gathers
            everything, or ``"sharded"``, a folder into which every rank writes what it holds. Both
            are read, whatever is written.
        report: what is printed of a plan: ``"short"``, the verdict and three lines, or ``"full"``
            with the stages as a table and as a picture, and whether ``"1f1b"`` would be faster.
        compile: whether ``torch.compile`` compiles the forwards of stages, each as one graph;
            or its options (``{"mode": "max-autotune"}``). Plans are made with the costs of stages
            that are not.
        pipelines: how many pipelines train side by side, each on batches of its own: N devices make
            that many pipelines of N / ``pipelines`` devices, and gradients are averaged over them
            as over the replicas of Lightning's DDP. ``plan`` and ``cluster`` are of one.
        timeout: seconds after which a wait for another rank ends in an error.
        start_method: how processes are started on this host.

    Raises:
        ValueError: unknown schedule or planner (the text lists the known ones), or a number that
            makes no sense.
    """

    plan: Plan | None = None
    stage_graph: StageGraph | None = None
    emulation_report: EmulationReport | None = None
    on_record: Callable[[ActionRecord], None] | None = None
    _optimized: pl.LightningModule | None = None

    def __init__(
        self,
        num_microbatches: int | None = None,
        schedule: str | None = None,
        planner: str | None = None,
        plan: PlanLike | None = None,
        module: str | None = None,
        *,
        blocks: BlockGraph | None = None,
        leaf_modules: Sequence[type | str] = (),
        cluster: ClusterLike | None = None,
        cache: CacheLike = True,
        costs: CostsLike | None = None,
        use_all_devices: bool = True,
        weights: str | None = None,
        state_dict_type: StateDictType = "full",
        report: Report = "short",
        compile: bool | Mapping[str, Any] = False,
        pipelines: int = 1,
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
        check_name("state_dict_type", state_dict_type, get_args(StateDictType))
        check_name("start_method", start_method, get_args(StartMethod))
        check_whole("pipelines", pipelines)
        if schedule == _ASYNC and num_microbatches is None:
            num_microbatches = 1
        self.settings = Settings(
            num_microbatches=num_microbatches,
            schedule=schedule,
            planner=planner or GRAPHPIPE,
            plan=plan,
            module=module,
            blocks=blocks,
            leaf_modules=tuple(leaf_modules),
            timeout_s=timeout,
            cluster=cluster,
            cache=cache,
            use_all_devices=use_all_devices,
            costs=resolve_costs(costs),
            weights=weights,
            report=report,
            compile=compile_options(compile, schedule),
        )
        check_settings(self.settings)
        self.state_dict_type = state_dict_type
        self.num_pipelines = pipelines
        self._start_method = start_method
        self.reports = PlanReports()
        self._scopes = ExitStack()

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """``configure_model`` runs in this: what it makes takes no memory of this process."""
        with mapping_modules(), freed_at_once():
            yield

    # Setting up and tearing down -------------------------------------------------------------

    def setup(self, trainer: pl.Trainer) -> None:
        """Prepares what does not need data; the pipeline is built at the first batch."""
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        self._scopes.enter_context(_without_idle_warnings(is_alone=self.peers is None))
        module, session = self._module(), self.session
        session.run.on_built, session.on_emulated = self._show, self._show_emulated
        place_precision(self.precision_plugin, self.root_device, self.total)
        give_values(module)
        self.model = self.precision_plugin.convert_module(self.model)
        if self.state_dict_type == "sharded":
            refuse_callbacks(trainer, refusals.SHARDED)
        alone = session.run.is_alone
        refuse_callbacks(trainer, refusals.ON_ONE_RANK if alone else refusals.ON_STAGES)
        count_pipelines(trainer, self.num_pipelines)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            self._optimized = module
            if self.settings.is_asynchronous:
                refuse_for_async(trainer, self.settings)
        self.setup_precision_plugin()
        compute_alike(module, session.run.peers)
        # After a fit the Trainer still has its optimizers; another module is no concern of theirs.
        optimizers = self.optimizers if self._optimized is module else []
        session.run.attach(module, [plain(optimizer) for optimizer in optimizers])
        if trainer.state.fn == TrainerFn.FITTING and not module.automatic_optimization:
            session.optimize_by_hand(self._lightning_optimizers)
        self._hooks = LedHooks(session)
        self._scopes.callback(self._hooks.remove)
        self._hooks.install()
        self._scopes.enter_context(finetuning_hooks(trainer, session.run.whole_optimizers))
        terminate = session.run.failures.terminate
        self._scopes.enter_context(signals_answered_by_all(trainer, terminate))

    def model_to_device(self) -> None:
        """Nothing: a rank's parameters move when the pipeline is built."""

    def teardown(self) -> None:
        """Makes the module whole again and closes the connections."""
        self._scopes.close()
        self._hooks = None
        session, self._session = self._session, None
        if session is not None:
            if self.peers is not None and session.run.has_module:
                compute_alike(session.run.module, None)
            if session.run.failures.has_failed:
                self._optimized = None
            session.close()
        self.precision_plugin.teardown()
        assert self.accelerator is not None and self.cluster_environment is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        self.cluster_environment.teardown()

    def on_exception(self, exception: BaseException) -> None:
        """Ends the other ranks too; an error that only echoes another rank's becomes that one."""
        if self._session is not None and not isinstance(exception, SIGTERMException):
            first = self._session.run.failures.origin(exception)
            if first is not None:
                self.teardown()
                raise first from None

    # Steps -----------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's step; a backward of the loss it returns is run by all ranks."""
        run = self.session.run
        self.reports.batch_begins(
            is_recorded=run.recorder.is_on,
            in_pipeline_s=run.in_pipeline_s if run.can_time else None,
        )
        with self.precision_plugin.train_step_context():
            result = self._step("training_step", *args, **kwargs)
        self.skips_step = result is None and self._module().automatic_optimization
        return result

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
        self.session.run.recorder.on_record = self.on_record
        return self.session.step(name, batch, args, kwargs)

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Goes backward on all ranks, in manual optimization too.

        Raises:
            NotImplementedError: only some parameters are to get gradients.
        """
        if kwargs.get("inputs") is not None:
            raise NotImplementedError(ONLY_SOME)
        run, manual = self.session.run, self.session.manual
        by_hand = nullcontext(closure_loss) if manual is None else manual.backward(closure_loss)
        with run.failures.guard(), by_hand as loss:
            return super().backward(loss, optimizer, *args, **kwargs)

    def after_backward(self) -> None:
        """Averages gradients over pipelines, once all that an optimizer step takes are there."""
        self.session.run.average_gradients()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Backwards in this are followed by others before the optimizer steps."""
        with instance_attribute(self.session.run, "accumulates", True):
            yield

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Steps an optimizer on all ranks, in manual optimization too."""
        self.session.run.take_saved_optimizers()
        manual = self.session.manual
        by_hand = nullcontext() if manual is None else manual.step(optimizer, closure, kwargs)
        with by_hand:
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    def _show(self) -> None:
        """Keeps the plan and prints it where a person looks."""
        run = self.session.run
        self.plan, self.stage_graph = run.built.plan, run.built.placed.stages
        if run.built.planned is not None:
            can_time = self._module().trainer.state.fn == TrainerFn.FITTING and run.can_time
            self.reports.built(run.built.planned, self.settings, can_time=can_time)

    def on_train_end(self) -> None:
        """A verdict that was to come is said."""
        super().on_train_end()
        self.reports.training_ends()

    def _show_emulated(self, report: EmulationReport) -> None:
        """Prints what the emulated steps took, and keeps it where the starting process finds it."""
        self.emulation_report = report
        show(report.text(width()))
        metrics = {name: torch.tensor(value) for name, value in report.metrics().items()}
        self._module().trainer.callback_metrics.update(metrics)

    # Data ------------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: object) -> object:
        """The user's loader, which rank 0 reads and the others follow, once ranks are joined."""
        if self._session is None:
            return dataloader
        with self._session.run.failures.guard():
            return as_long_as_leaders(dataloader, self._session.run.control)

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Moves a batch where there is one."""
        if isinstance(batch, RemoteBatch | PlacedBatch):
            return batch.batch if isinstance(batch, PlacedBatch) else batch
        with self.session.run.alone("the transfer of a batch"):
            return super().batch_to_device(batch, device, dataloader_idx)

    # Optimizers ------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Precision:
        """The precision in use, with gradient clipping and one loss scale over all ranks."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = pipeline_precision(precision_plugin, self)

    @property
    def clips_alone(self) -> bool:
        """Whether every rank clips the norm of its own gradients: others have no such yet."""
        return self.settings.overlaps

    def counted_parameters(self) -> list[nn.Parameter] | None:
        """Parameters that count on this rank, each on one; None before the pipeline is built."""
        if self._session is None or self._session.run.model is None:
            return None
        return self._session.run.partition.counted_parameters()


@contextmanager
def _without_idle_warnings(*, is_alone: bool) -> Iterator[None]:
    """Without what Lightning would say on every rank, and nobody can act on.

    A deprecation inside of Lightning itself, and its advice to reduce logged values: in a pipeline
    that is alone they are equal on all ranks already.
    """
    with warnings.catch_warnings():
        if is_alone:
            warnings.filterwarnings("ignore", message="It is recommended to use `self.log")
        deprecated = r"`isinstance\(treespec, LeafSpec\)` is deprecated"
        warnings.filterwarnings("ignore", message=deprecated)
        yield
