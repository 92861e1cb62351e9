"""Jobs that must fail: on every rank, soon, and with the first error."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as lp
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from helpers.models import DataSpec, ExportableModel
from helpers.random_models import INPUT_WIDTHS, WIDTH
from helpers.training import make_trainer, quiet

FAULTY_BATCH = 2
"""Batch in which faults in the middle of training happen."""


class DataDependentModel(ExportableModel):
    """Decides by a tensor's values what to compute."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        if left.sum() > right.sum():
            return super().forward(left, right)
        return super().forward(left + 1, right)


class FragileLayer(nn.Linear):
    """Refuses inputs that are not numbers."""

    def forward(self, x: Tensor) -> Tensor:
        if bool(x.isnan().any()):
            raise ArithmeticError("the fragile layer got a nan")
        return super().forward(x)


class FragileModel(ExportableModel):
    """A fragile layer in its first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.left = FragileLayer(INPUT_WIDTHS[0], WIDTH)


class FailingStepModel(ExportableModel):
    """Fails in the user's own code."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == FAULTY_BATCH:
            self.fail(batch)
        return super().training_step(batch, batch_idx)

    def fail(self, batch: Any) -> None:
        raise ArithmeticError("training_step is out of order")


class PenaltyOnAllModel(ExportableModel):
    """Its loss depends on parameters that other ranks hold."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for parameter in self.parameters():
            loss = loss + parameter.square().sum()
        return loss


class FailingAfterForwardModel(FailingStepModel):
    """Fails between forward and backward."""

    def fail(self, batch: Any) -> None:
        super().fail(self(*batch[0]))


class FailingHookModel(ExportableModel):
    """Fails in the backward, on the way from the loss to the pipelined forward."""

    num_calls = 0

    def call_forward(self, inputs: tuple[Tensor, ...]) -> Any:
        output = super().call_forward(inputs)
        self.num_calls += 1
        if self.training and self.num_calls == 3:
            output.register_hook(self.fail)
        return output

    def fail(self, gradient: Tensor) -> None:
        raise ArithmeticError("the hook on the output is out of order")


class SecondDerivativeModel(FailingStepModel):
    """Takes a gradient that can be differentiated once more, of the inputs."""

    def fail(self, batch: Any) -> None:
        inputs = [x.clone().requires_grad_() for x in batch[0]]
        torch.autograd.grad(self(*inputs).square().sum(), inputs, create_graph=True)


class SomeInputsModel(FailingStepModel):
    """Asks for the gradients of some parameters, of the first stage or of the last.

    Args:
        name: of the module whose parameters they are.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.some = name

    def fail(self, batch: Any) -> None:
        parameters = list(self.get_submodule(self.some).parameters())
        self(*batch[0]).sum().backward(inputs=parameters)


class TwoBackwardsModel(FailingStepModel):
    """Goes back through one call of the forward twice, in the step."""

    def fail(self, batch: Any) -> None:
        total = self(*batch[0]).sum()  # keeps no tensor of its own for the backward
        total.backward()
        total.backward()


class ManualModel(ExportableModel):
    """Steps its optimizer by hand."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer: Any = self.optimizers()
        optimizer.step()


class TwoBackwardsHookModel(ExportableModel):
    """Goes back from the loss twice, in the hook for it."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        if self.global_step == FAULTY_BATCH:
            super().backward(loss, *args, **kwargs)


class FailingValidationModel(ExportableModel):
    """Fails in the user's own validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        raise ArithmeticError("validation_step is out of order")


class FailingOptimizer(torch.optim.SGD):
    """Fails at the third step, on ranks other than 0."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.num_steps += 1
        if self.num_steps == 3 and os.environ["RANK"] != "0":
            raise ArithmeticError("the optimizer is out of order")
        return loss


class FailingOptimizerModel(ExportableModel):
    """Trains with a failing optimizer."""

    def configure_optimizers(self) -> Any:
        return FailingOptimizer(self.parameters(), lr=0.01)


class FailingData(Dataset[Any]):
    """Fails, or gives a nan, in the middle of an epoch."""

    def __init__(self, fault: str) -> None:
        self._fault = fault
        self._samples: Any = DataSpec(num_samples=40, num_inputs=2).loader().dataset

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        (left, right), target = self._samples[index]
        if index == 8 * FAULTY_BATCH + 3:
            if self._fault == "raise":
                raise ArithmeticError("the data set is out of order")
            left = left * torch.nan
        return (left, right), target


class FailingLoader(DataLoader[Any]):
    """Cannot be read at all."""

    def __iter__(self) -> Any:
        raise ArithmeticError("the data loader is out of order")


class FailOnRank(lp.Callback):
    """A callback that fails on one rank in the middle of training."""

    def __init__(self, rank: int, how: str) -> None:
        self._rank = rank
        self._how = how

    def on_train_batch_start(self, trainer: lp.Trainer, *args: Any) -> None:
        if trainer.global_rank == self._rank and trainer.global_step == FAULTY_BATCH:
            if self._how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self._how == "exit":
                os._exit(3)
            raise ArithmeticError("the callback is out of order")


class FailInBackward(FailOnRank):
    """A gradient of the first layer that fails on one rank, while others wait for it."""

    def on_train_batch_start(self, trainer: lp.Trainer, pl_module: Any, *args: Any) -> None:
        if trainer.global_rank == self._rank and trainer.global_step == FAULTY_BATCH:
            pl_module.left[0].weight.register_hook(self._fail)

    def _fail(self, gradient: Tensor) -> None:
        raise ArithmeticError(f"{self._how} of {tuple(gradient.shape)} is out of order")


class ReadsAllWeights(lp.Callback):
    """Needs values of all parameters, or a part of the model, after every batch.

    Args:
        read: what it does with the module.
    """

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._read = read

    def on_train_batch_end(self, trainer: lp.Trainer, pl_module: Any, *args: Any) -> None:
        self._read(pl_module)


def _follow(module: Any) -> None:
    """As a moving average does that the user keeps."""
    with torch.no_grad():
        for parameter in module.parameters():
            torch.zeros_like(parameter, device=module.device).lerp_(parameter, 0.1)


@dataclass(frozen=True)
class Fault:
    """A job that must fail.

    Attributes:
        pattern: what the error says on every rank that lives, a regular expression.
        build: makes the module.
        strategy: arguments of the strategy beside ``num_microbatches=4``.
        data: what is wrong with the data: one of its items, or, for ``"loader"``, all of it.
        callbacks: makes callbacks that fail.
        validate: whether validation runs first.
        killed_rank: the rank that does not live to tell.
        schedules: with which it is tried.
    """

    pattern: str
    build: Callable[[], Any] = ExportableModel
    strategy: dict[str, Any] = field(default_factory=dict)
    data: str = ""
    callbacks: Callable[[], list[lp.Callback]] = list
    validate: bool = False
    killed_rank: int | None = None
    schedules: tuple[str, ...] = ("gpipe", "1f1b")


ONCE = ("gpipe",)
"""Schedules of a fault before any step, or of what only a step on the whole batch can do."""


FAULTS = {
    "plan with a cycle": Fault(
        r"(?i)circle|cycle|each other",
        strategy={"plan": [["left", "norm"], ["right"], ["fuse", "head"]]},
        schedules=ONCE,
    ),
    "module that cannot be captured": Fault(
        r"(?s)faults\.py.*(control flow|leaf|blocks|module)", DataDependentModel
    ),
    "forward of an early stage": Fault(
        "the fragile layer got a nan",
        FragileModel,
        {"plan": [["left"], ["right"], ["fuse", "norm", "head"]], "leaf_modules": (FragileLayer,)},
        data="nan",
    ),
    "training_step": Fault("training_step is out of order", FailingStepModel),
    "between forward and backward": Fault(
        "training_step is out of order", FailingAfterForwardModel
    ),
    "backward of the loss": Fault("the hook on the output is out of order", FailingHookModel),
    "penalty on the parameters of others": Fault(
        "parameters (or buffers )?that another rank holds.*weight_decay", PenaltyOnAllModel
    ),
    "second derivatives": Fault(
        "create_graph=True asks for second derivatives", SecondDerivativeModel, schedules=ONCE
    ),
    "gradients of another rank's": Fault(
        "backward.inputs=.* does not work", lambda: SomeInputsModel("left"), schedules=ONCE
    ),
    "gradients of rank 0's": Fault(
        "backward.inputs=.* does not work", lambda: SomeInputsModel("head"), schedules=ONCE
    ),
    "two backwards of a call": Fault(
        "backward went through one call .* a second time.*retain_graph=True",
        TwoBackwardsModel,
        schedules=ONCE,
    ),
    "two backwards of a loss": Fault(
        "(?i)backward was called twice on the loss|backward through the graph a second time",
        TwoBackwardsHookModel,
    ),
    "manual optimization": Fault(
        "(?s)manual optimization.*gpipe", ManualModel, schedules=("1f1b",)
    ),
    "validation_step": Fault(
        "validation_step is out of order", FailingValidationModel, validate=True
    ),
    "optimizer": Fault("the optimizer is out of order", FailingOptimizerModel),
    "data set": Fault("the data set is out of order", data="raise"),
    "data loader": Fault("the data loader is out of order", data="loader"),
    "callback of one rank": Fault(
        "the callback is out of order", callbacks=lambda: [FailOnRank(2, "raise")]
    ),
    "callback of rank 0": Fault(
        "the callback is out of order", callbacks=lambda: [FailOnRank(0, "raise")]
    ),
    "norms after every batch": Fault(
        "needs values of parameters",
        callbacks=lambda: [ReadsAllWeights(lambda m: [float(p.norm()) for p in m.parameters()])],
        schedules=ONCE,
    ),
    "an average of the user's": Fault(
        "needs values of parameters", callbacks=lambda: [ReadsAllWeights(_follow)], schedules=ONCE
    ),
    "backward of one replica": Fault(
        r"the gradient of \(6, 3\) is out of order",
        strategy={
            "plan": [
                {"modules": ["left"], "devices": [1, 2]},
                {"modules": ["right", "fuse", "norm", "head"], "device": 0},
            ]
        },
        callbacks=lambda: [FailInBackward(2, "the gradient")],
    ),
    "backward of another rank": Fault(
        r"the gradient of \(6, 3\) is out of order",
        strategy={
            "plan": [
                {"modules": ["left"], "device": 2},
                {"modules": ["right"], "device": 1},
                {"modules": ["fuse", "norm", "head"], "device": 0},
            ]
        },
        callbacks=lambda: [FailInBackward(2, "the gradient")],
    ),
    "killed rank": Fault("(?i)rank 1", callbacks=lambda: [FailOnRank(1, "kill")], killed_rank=1),
    "killed rank 0": Fault("(?i)rank 0", callbacks=lambda: [FailOnRank(0, "kill")], killed_rank=0),
    "rank that exits": Fault(
        "(?i)rank 2", callbacks=lambda: [FailOnRank(2, "exit")], killed_rank=2
    ),
}
"""Faults by name. Names travel to the ranks, since not all of this can be pickled."""


def run_fault(name: str, schedule: str, num_ranks: int = 3) -> None:
    """Runs a job that must raise."""
    fault = FAULTS[name]
    data = DataSpec(num_samples=40, num_inputs=2)
    samples: Any = FailingData(fault.data) if fault.data else data.loader().dataset
    loaders = [(FailingLoader if fault.data == "loader" else DataLoader)(samples, 8)]
    if fault.validate:
        loaders.append(data.loader())
    module = fault.build()
    with quiet():
        strategy = {"num_microbatches": 4, "timeout": 300.0, "schedule": schedule} | fault.strategy
        trainer = make_trainer(strategy, num_ranks, max_steps=20, callbacks=fault.callbacks())
        trainer.fit(module.double(), *loaders)


def train_on_after_a_fault(folder: str, num_ranks: int) -> None:
    """A callback of rank 1 fails, another saves what there is, the module trains on.

    Args:
        folder: of the checkpoint.
        num_ranks: of the pipeline.
    """
    data, module = DataSpec(num_samples=40, num_inputs=2), ExportableModel().double()
    callbacks = [FailOnRank(1, "raise"), ModelCheckpoint(folder, "left", save_on_exception=True)]
    strategy = {"num_microbatches": 4, "timeout": 300.0}
    with quiet():
        options = {"max_steps": 20, "enable_checkpointing": True, "callbacks": callbacks}
        trainer = make_trainer(strategy, num_ranks, **options)
        with pytest.raises(ArithmeticError, match="the callback is out of order"):
            trainer.fit(module, data.loader())
        assert "failure-end" not in {thread.name for thread in threading.enumerate()}
        (path,) = Path(folder).iterdir()
        saved = torch.load(path, weights_only=False)
        assert saved["global_step"] == FAULTY_BATCH
        for name, value in module.state_dict().items():
            assert torch.equal(value, saved["state_dict"][name])
        make_trainer(strategy, num_ranks, max_steps=3).fit(module, data.loader())


def read_after_a_fault(folder: str, num_ranks: int) -> list[str]:
    """Rank 1 is killed, the others try to save and to read what there is.

    Args:
        folder: of the checkpoint.
        num_ranks: of the pipeline.

    Returns:
        What they are told.
    """
    data, module = DataSpec(num_samples=40, num_inputs=2), ExportableModel().double()
    callbacks = [FailOnRank(1, "kill"), ModelCheckpoint(folder, save_on_exception=True)]
    strategy = {"num_microbatches": 4, "timeout": 300.0}
    with quiet():
        options = {"max_steps": 20, "enable_checkpointing": True, "callbacks": callbacks}
        trainer = make_trainer(strategy, num_ranks, **options)
        with pytest.raises(RuntimeError, match="rank 1") as caught:
            trainer.fit(module, data.loader())
    told = [str(caught.value), *getattr(caught.value, "__notes__", [])]
    inputs, _ = next(iter(data.loader()))
    for read in (
        module.state_dict,
        lambda: trainer.save_checkpoint(Path(folder, "late.ckpt")),
        lambda: module(*inputs),
        lambda: make_trainer(strategy, num_ranks).fit(module, data.loader()),
    ):
        with pytest.raises(RuntimeError) as refused:
            read()
        told.append(str(refused.value))
    return told
