"""What the strategies share, from the Trainer's setup to its teardown."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from inspect import signature
from typing import Any, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DistributedSampler

from lightning_gpp.common.instance_attribute import instance_attribute
from lightning_gpp.common.mapped_tensor import freed_at_once, mapping_modules
from lightning_gpp.common.torch_device import is_accelerator
from lightning_gpp.emulation.report import EmulationReport
from lightning_gpp.planner import Plan
from lightning_gpp.strategy.lightning_private import (
    SIGTERMException,
    is_overridden,
    signals_answered_by_all,
    when_batch_ends,
)
from lightning_gpp.strategy.logging.logs import compute_alike
from lightning_gpp.strategy.ranks.pipelines import StartMethod
from lightning_gpp.strategy.recording.replanning import replanning
from lightning_gpp.strategy.report import PlanReports, show, width
from lightning_gpp.strategy.settings import (
    DIVIDED,
    ON_STAGES,
    SHARDED,
    Settings,
    check_name,
    check_replanning,
    check_settings,
    refuse_callbacks,
    refuse_for_async,
)
from lightning_gpp.strategy.state.callbacks import count_pipelines, finetuning_hooks
from lightning_gpp.strategy.state.held_elsewhere import ONLY_SOME
from lightning_gpp.strategy.state.precision import pipeline_precision, place_precision
from lightning_gpp.strategy.state.saving import SavingStrategy, plain
from lightning_gpp.strategy.state.without_values import give_values
from lightning_gpp.strategy.step.hooks import LedHooks
from lightning_gpp.strategy.step.loaders import PlacedBatch, RemoteBatch, as_long_as_leaders


class BaseStrategy(SavingStrategy):
    """Runs the user's code on rank 0, the leader; all other ranks follow.

    Args:
        settings: what the user asked for.
        start_method: how processes are started on this host.
        lightning: arguments of all Lightning strategies (``accelerator``, ``precision_plugin``).
    """

    plan: Plan | None = None
    _optimized: pl.LightningModule | None = None

    def __init__(
        self,
        settings: Settings,
        *,
        start_method: StartMethod = "popen",
        **lightning: Any,
    ) -> None:
        own, of_all = (signature(each).parameters for each in (type(self), ParallelStrategy))
        known = [*[*own][:-1], *of_all]  # without **lightning
        for name in lightning.keys() - {*known}:
            raise TypeError(f"unknown option {name!r}; known options: {', '.join(known)}")
        super().__init__(**lightning)
        check_name("start_method", start_method, get_args(StartMethod))
        check_settings(settings)
        self.settings = settings
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
            refuse_callbacks(trainer, SHARDED)
        if not (run := session.run).is_alone:
            refuse_callbacks(trainer, ON_STAGES)
        elif not run.can_stay_whole:
            refuse_callbacks(trainer, DIVIDED)
        elif any(isinstance(one, (*DIVIDED,)) for one in trainer.callbacks):  # type: ignore[attr-defined]
            run.stays_whole = True
            module.to(self.root_device)
            show("A callback renames parameters: forward runs as it is, in one piece.")
        count_pipelines(trainer, self.num_pipelines)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            self._optimized = module
            if self.settings.is_asynchronous:
                refuse_for_async(trainer, self.settings)
            check_replanning(module, self.settings)
            self._scopes.enter_context(replanning(trainer, session.run))
        self.setup_precision_plugin()
        compute_alike(module, session.run.peers)
        # After a fit the Trainer still has its optimizers; another module is no concern of theirs.
        optimizers = self.optimizers if self._optimized is module else []
        session.run.attach(module, [plain(optimizer) for optimizer in optimizers])
        session.manual.wrapped = self._lightning_optimizers
        self._hooks = self._scopes.enter_context(LedHooks(session))
        self._hooks.install()
        self._scopes.enter_context(finetuning_hooks(trainer, session.run.whole_optimizers))
        terminate = session.run.failures.terminate
        self._scopes.enter_context(signals_answered_by_all(trainer, terminate))
        self._scopes.enter_context(session.run.failures.holding_interrupts())
        self._scopes.enter_context(when_batch_ends(trainer, session.run.interrupt.answer))
        self._scopes.callback(session.run.interrupt.let_go)

    def model_to_device(self) -> None:
        """Does nothing: parameters move when the pipeline is built."""

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
        if is_accelerator(run.device):  # a backward there ends in a thread that cannot hold it
            run.interrupt.hold()
        is_led = not run.is_everywhere
        by_hand = manual.backward(closure_loss) if is_led else nullcontext(closure_loss)
        with run.failures.guard(), by_hand as loss:
            ended = super().backward(loss, optimizer, *args, **kwargs)
        run.interrupt.hold()  # others may step
        return ended

    def after_backward(self) -> None:
        """Averages gradients over pipelines, once all that an optimizer step takes are there."""
        self.session.run.average_gradients()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Backwards in this are followed by others before the optimizer steps."""
        with instance_attribute(self.session.run, "accumulates", True):
            yield

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Steps an optimizer on all ranks, in manual optimization too."""
        run, manual = self.session.run, self.session.manual
        run.take_saved_optimizers()
        is_led = not run.is_everywhere
        with manual.step(optimizer, closure, kwargs) if is_led else nullcontext():
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    def _show(self) -> None:
        """Keeps the plan and prints it where a person looks."""
        run = self.session.run
        self.plan = run.built.plan
        if run.built.planned is not None:
            loop = self._module().trainer.state.fn
            assert loop is not None, "no loop runs"
            # Of processes on CPUs a prediction is worth less than what the batches took.
            can_time = loop == TrainerFn.FITTING and (run.can_time or run.device.type == "cpu")
            planned = run.built.planned
            self.reports.built(planned, self.settings, loop.value, can_time=can_time)

    def on_train_end(self) -> None:
        """A verdict that was to come is said."""
        super().on_train_end()
        self.reports.training_ends()

    def _show_emulated(self, report: EmulationReport) -> None:
        """Prints what the emulated steps took, and keeps it where the starting process finds it."""
        show(report.text(width()))
        metrics = {name: torch.tensor(value) for name, value in report.metrics().items()}
        self._module().trainer.callback_metrics.update(metrics)

    # Data ------------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: object) -> object:
        """The user's loader, which rank 0 reads and the others follow, once ranks are joined."""
        if self._session is None:
            return dataloader
        sampler = getattr(dataloader, "sampler", None)
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas != self.num_pipelines:
            raise ValueError(
                f"the loader has a DistributedSampler with num_replicas={sampler.num_replicas}, "
                "but all ranks of a pipeline read the same batches: "
                f"pipelines={self.num_pipelines}. "
                "Remove the sampler: Lightning adds one where it is needed"
            )
        with self._session.run.failures.guard():
            return as_long_as_leaders(dataloader, self._session.run.control)

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Moves a batch where there is one."""
        if isinstance(batch, RemoteBatch | PlacedBatch):
            return batch.batch if isinstance(batch, PlacedBatch) else batch
        with self.session.run.alone("the transfer of a batch"):
            placed = super().batch_to_device(batch, device, dataloader_idx)
        module = self._module()
        owners = module, getattr(module.trainer, "datamodule", None)
        hooks = "transfer_batch_to_device", "on_after_batch_transfer"
        if is_accelerator(self.root_device) and not any(
            is_overridden(hook, owner) for owner in owners for hook in hooks
        ):
            self.session.run.originals.note(batch, placed)
        return placed

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
        return self.settings.is_asynchronous

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
