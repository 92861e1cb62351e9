"""One training run, on one device or as a rank of a pipeline, and what is kept of it."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import lightning.pytorch as lp
import torch
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import rank_zero_only
from standin.switch import devices, one_device
from torch import Tensor
from torch.amp import GradScaler

from helpers.models import DataSpec
from helpers.random_models import SupervisedModule, arguments


@dataclass(frozen=True)
class Training:
    """What is trained, on what, for how long. Picklable: ranks build everything themselves.

    Attributes:
        build: makes the module; the same one in every process.
        data: training data; validation uses other samples of the same kind.
        num_steps: optimizer steps.
        validate: whether validation runs (after every epoch, and as a sanity check before).
        trainer: further arguments of the Trainer.
        callbacks: makes further callbacks, on every rank.
        checkpoint: file to resume from.
        save_as: file that ``trainer.save_checkpoint`` writes after the fit.
    """

    build: Callable[[], SupervisedModule]
    data: DataSpec = field(default_factory=DataSpec)
    num_steps: int = 12
    validate: bool = True
    trainer: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[lp.Callback]] = list
    checkpoint: str | None = None
    save_as: str | None = None

    def module(self) -> SupervisedModule:
        """A new module with its first weights, in the dtype of the data."""
        return self.build().to(getattr(torch, self.data.dtype))

    def example_arguments(self, num_samples: int = 2) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of the module's forward for a few samples."""
        inputs, _ = self.data.tensors()
        return arguments(self.module().signature, tuple(x[:num_samples] for x in inputs))

    def validation_data(self) -> DataSpec:
        """Other samples, fewer, again with an odd last batch."""
        return replace(self.data, seed=self.data.seed + 1, num_samples=13)


@dataclass
class Result:
    """What one rank has after a training run.

    Attributes:
        weights: state dict entries that exist on this rank (none on the meta device).
        held: the same at the end of training, when a rank of a pipeline holds its own only.
        losses: the logged ``train_loss`` of every batch.
        learning_rates: of every parameter group after every batch.
        validations: the logged metrics after every validation, sanity check left out.
        final_metrics: ``trainer.callback_metrics`` after the fit.
        logged: what the logger was given, by step (rank 0 only).
        own_parameters: parameters that were real tensors at the last batch.
        optimizer_state: parameters with optimizer state at the last batch.
        optimizer_groups: number of parameters in each group at the last batch.
        global_step: optimizer steps done.
        extra: what a test's own callbacks recorded (``Recording.record``).
    """

    weights: dict[str, Tensor] = field(default_factory=dict)
    held: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    learning_rates: list[list[float]] = field(default_factory=list)
    validations: list[dict[str, float]] = field(default_factory=list)
    final_metrics: dict[str, float] = field(default_factory=dict)
    logged: list[dict[str, float]] = field(default_factory=list)
    own_parameters: set[str] = field(default_factory=set)
    optimizer_state: set[str] = field(default_factory=set)
    optimizer_groups: list[int] = field(default_factory=list)
    global_step: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


class Recording(lp.Callback):
    """Keeps what a :class:`Result` holds."""

    def __init__(self, result: Result) -> None:
        self.result = result

    def on_train_batch_end(
        self, trainer: lp.Trainer, pl_module: lp.LightningModule, *_: Any
    ) -> None:
        optimizer = trainer.optimizers[0]
        metrics = trainer.callback_metrics
        loss = metrics.get("train_loss_step", metrics.get("train_loss"))
        self.result.losses.append(float("nan") if loss is None else float(loss))
        self.result.learning_rates.append([group["lr"] for group in optimizer.param_groups])
        self.result.optimizer_groups = [len(group["params"]) for group in optimizer.param_groups]
        names = {parameter: name for name, parameter in pl_module.named_parameters()}
        self.result.own_parameters = {n for p, n in names.items() if not p.is_meta}
        self.result.optimizer_state = {
            names[p] for p in optimizer.state if optimizer.state[p] and p in names
        }

    def on_train_end(self, trainer: lp.Trainer, pl_module: lp.LightningModule) -> None:
        self.result.held = held_tensors(pl_module)

    def on_validation_end(self, trainer: lp.Trainer, pl_module: lp.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.result.validations.append(_numbers(trainer.callback_metrics))


class MemoryLogger(Logger):
    """A logger that keeps what it is given, with the step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> str:
        return "0"

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append({"step": float(step or 0)} | {k: float(v) for k, v in metrics.items()})


def train(training: Training, strategy: Mapping[str, Any] | None, num_ranks: int = 1) -> Result:
    """Trains as this process's rank.

    Args:
        training: what to train.
        strategy: arguments of ``GraphPipeStrategy``, or of the one that is named as ``kind``,
            which may be one of Lightning's; None trains on one plain device.
        num_ranks: ranks of the job.
    """
    result = Result()
    module = training.module()
    with tempfile.TemporaryDirectory() as folder, quiet():
        logger = MemoryLogger()
        trainer = make_trainer(
            strategy,
            num_ranks,
            default_root_dir=folder,
            logger=logger,
            max_steps=training.num_steps,
            callbacks=[*training.callbacks(), Recording(result)],
            **training.trainer,
        )
        loaders = [training.data.loader()]
        if training.validate:
            loaders.append(training.validation_data().loader())
        trainer.fit(module, *loaders, ckpt_path=training.checkpoint)
        result.weights = real_tensors(module)
        if training.save_as is not None:
            trainer.save_checkpoint(training.save_as)
    result.final_metrics = _numbers(trainer.callback_metrics)
    result.logged = logger.rows
    result.global_step = trainer.global_step
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        result.extra.update(getattr(callback, "record", {}))
    return result


def make_trainer(
    strategy: Mapping[str, Any] | None, num_ranks: int = 1, **arguments: Any
) -> lp.Trainer:
    """A silent Trainer, with the pipeline strategy or on one plain device, which is the CPU."""
    chosen: Any = "auto"
    if strategy is not None:
        from lightning_gpp import strategy as ours

        kind = strategy.get("kind", "GraphPipeStrategy")
        arguments_of = {name: value for name, value in strategy.items() if name != "kind"}
        chosen = getattr(ours, kind)(**arguments_of) if hasattr(ours, kind) else kind
    defaults = {
        "accelerator": "cpu",
        "devices": num_ranks,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "log_every_n_steps": 1,
        "logger": False,
    }
    if strategy is not None:
        defaults |= devices(num_ranks)
    return lp.Trainer(strategy=chosen, **(defaults | arguments))


def float16_mixed(**scaler: Any) -> MixedPrecision:
    """For ranks of any device: Lightning takes ``16-mixed`` on a CPU for ``bf16-mixed``."""
    device = {"cpu": "cpu", "gpu": "cuda"}[str(one_device()["accelerator"])]
    return MixedPrecision("16-mixed", device, GradScaler(device, **scaler))


@contextmanager
def quiet() -> Iterator[None]:
    """Without Lightning's advice about loaders and loggers."""
    level = logging.getLogger("lightning.pytorch").level
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"lightning\.(pytorch|fabric)")
        try:
            yield
        finally:
            logging.getLogger("lightning.pytorch").setLevel(level)


def real_tensors(module: lp.LightningModule) -> dict[str, Tensor]:
    """Copies of the state dict entries that are not on the meta device."""
    return {
        name: tensor.detach().clone()
        for name, tensor in module.state_dict().items()
        if not tensor.is_meta
    }


def held_tensors(module: lp.LightningModule) -> dict[str, Tensor]:
    """Copies of what this rank holds; ``state_dict`` would make the module whole here."""
    return {
        f"{path}.{name}".lstrip("."): tensor.detach().clone()
        for path, part in module.named_modules()
        for name, tensor in (part._parameters | part._buffers).items()
        if tensor is not None and not tensor.is_meta
    }


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}
