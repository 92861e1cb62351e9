"""What cannot work says so, names the thing, and leaves no rank waiting."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as lp
import pytest
import torch
from helpers.jobs import lines_of_fit
from helpers.models import FIXED_MODELS, DataSpec
from helpers.random_models import BranchyModel, OptimizerSpec
from helpers.random_programs import DrawsPrograms
from helpers.reference import train_pipeline
from helpers.training import Training
from helpers.workers import WorkerError, WorkerPool
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor

from lightning_gpp import EmulatedAccelerator, TimelineCallback
from lightning_gpp.strategy import HAPStrategy


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"shares": [0.5, 0.4]}, r"sum to 1; got \[0.5, 0.4\], which sum to 0.9"),
        ({"shares": [1.0, 0.0]}, r"numbers above 0.*leave devices out"),
        ({"shares": [0.5, float("nan")]}, r"shares.*one number per device, got \[0.5, nan\]"),
        ({"shares": 0.5}, r"shares.*one number per device, got 0.5"),
        ({"planner": "nothing"}, r"nothing.*hap.*data_parallel"),
    ],
)
def test_options(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        HAPStrategy(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["num_microbatches", "schedule", "pipelines"])
def test_options_of_pipelines(option: str) -> None:
    with pytest.raises(TypeError, match=option):
        HAPStrategy(**{option: 2})


def test_a_share_for_every_device() -> None:
    with pytest.raises(ValueError, match="3 numbers for 2 devices"):
        lp.Trainer(accelerator="cpu", devices=2, strategy=HAPStrategy(shares=[0.2, 0.3, 0.5]))


def test_emulated_devices() -> None:
    with pytest.raises(NotImplementedError, match="emulated devices run pipelines"):
        lp.Trainer(accelerator=EmulatedAccelerator("summit"), devices=2, strategy=HAPStrategy())


def test_more_devices_than_samples(pool: WorkerPool) -> None:
    training = Training(build, DataSpec(batch_size=1), num_steps=1, validate=False)
    strategy = {"kind": "HAPStrategy", "planner": "data_parallel", "timeout": 100.0}
    found = pool.run(lines_of_fit, training, strategy, 2, num_ranks=2)
    assert len([line for line in found[0] if "the program divides nothing" in line]) == 1


def timeline() -> list[lp.Callback]:
    """A callback of pipelines."""
    return [TimelineCallback()]


def test_timelines(pool: WorkerPool) -> None:
    training = Training(build, DataSpec(), num_steps=1, validate=False, callbacks=timeline)
    with pytest.raises(WorkerError, match="actions of a pipeline"):
        train_pipeline(pool, training, num_ranks=2, kind="HAPStrategy")


def averages() -> list[lp.Callback]:
    """A callback of whole weights."""
    return [EMAWeightAveraging()]


def test_averages_of_weights(pool: WorkerPool) -> None:
    training = Training(build, DataSpec(), num_steps=1, validate=False, callbacks=averages)
    with pytest.raises(WorkerError, match="EMAWeightAveraging averages whole weights"):
        train_pipeline(pool, training, num_ranks=2, kind="HAPStrategy")


class CallsUnderAutocast(BranchyModel):
    """Its step has an autocast of its own."""

    def call_forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().call_forward(inputs)


@pytest.mark.parametrize("is_own", [False, True])
def test_mixed_precision(pool: WorkerPool, is_own: bool) -> None:
    """Whether the Trainer's or the step's."""
    spec = FIXED_MODELS["chain"]
    kind = CallsUnderAutocast if is_own else BranchyModel
    training = Training(
        partial(kind, spec, OptimizerSpec()),
        DataSpec(dtype="float32"),
        num_steps=1,
        validate=False,
        trainer={} if is_own else {"precision": "bf16-mixed"},
    )
    with pytest.raises(WorkerError, match="use precision='bf16-true'"):
        train_pipeline(pool, training, num_ranks=2, kind="HAPStrategy")


class Decides(BranchyModel):
    """What it computes depends on data."""

    def forward(self, *args: Tensor) -> Tensor:
        found = super().forward(*args)
        return found * 2 if found.sum() > 0 else found


class Reversed(torch.autograd.Function):
    """Its gradient is not that of what it computes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


class Reverses(BranchyModel):
    """It has a backward of its own."""

    def forward(self, *args: Tensor) -> Tensor:
        return super().forward(Reversed.apply(args[0] * 1.0), *args[1:])  # type: ignore[no-untyped-call]


class Hooks(BranchyModel):
    """A hook looks at gradients of a layer."""

    def make_layers(self) -> None:
        super().make_layers()
        self.entries[0].register_full_backward_hook(lambda *_: None)


class FailsOnOne(BranchyModel):
    """Its user's step fails after some batches, on rank 0, where it runs."""

    def training_step(self, batch: object, batch_idx: int) -> object:
        if batch_idx == 2:
            raise ArithmeticError("no such number")
        return super().training_step(batch, batch_idx)


class Relaxes(BranchyModel):
    """A layer, which is divided like all else, has another setting from the second epoch on."""

    def make_layers(self) -> None:
        super().make_layers()
        self.entries[0] = torch.nn.Sequential(self.entries[0], torch.nn.Dropout(0.0))

    def on_train_epoch_start(self) -> None:
        layers: Any = self.entries[0]
        layers[1].p = 0.5 * (self.current_epoch > 0)


class Adamish(torch.optim.Adam):
    """An optimizer that nobody knows."""


class Unknown(BranchyModel):
    """Its optimizer may look at parameters as a whole."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Adamish(self.parameters())


def build(kind: type[BranchyModel] = BranchyModel) -> BranchyModel:
    return kind(FIXED_MODELS["chain"], OptimizerSpec())


def failing(kind: type[BranchyModel]) -> Training:

    return Training(partial(build, kind), DataSpec(), num_steps=6, validate=False)


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        (Decides, {}, r"test_hap_refusals.py:\d+: the forward of Decides cannot be captured"),
        (Reverses, {}, r"a backward of its own \(Reversed\), which strategy='hap' would lose"),
        (Hooks, {}, r"a hook looks at gradients of entries.0, which strategy='hap' would lose"),
        (FailsOnOne, {}, r"no such number"),
        (Relaxes, {}, r"reads self.entries.0.1.p, which was 0.0 when .* and is 0.5 now"),
        (Unknown, {}, r"Adamish may compute with whole parameters"),
    ],
    ids=["capture", "backward", "hook", "step", "setting", "optimizer"],
)
def test_errors_end_all_ranks(
    pool: WorkerPool, kind: type[BranchyModel], options: dict[str, object], text: str
) -> None:
    with pytest.raises(WorkerError, match=text):
        train_pipeline(
            pool,
            failing(kind),
            num_ranks=2,
            kind="HAPStrategy",
            **({"planner": DrawsPrograms(2)} | options),
        )
