"""Inputs that go to other ranks a step early; a wrong guess of them does no harm."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from helpers.ahead import Uncounted, UncountedLate, train_ahead
from helpers.models import DataSpec, ExportableModel
from helpers.reference import assert_same_training, train_one_device
from helpers.training import Training
from helpers.workers import WorkerPool
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_gpp.strategy.settings import Settings
from lightning_gpp.strategy.step import loaders

PLAN = [["left", "right"], ["fuse", "norm", "head"]]
REPLICAS = [
    {"modules": ["left", "right"], "devices": [0, 1]},
    {"modules": ["fuse", "norm", "head"], "devices": [2]},
]


class Plain(ExportableModel):
    """Gives the forward the tensors of the batch, as they are."""


class OfOthers(ExportableModel):
    """Gives it others in every third step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (left, right), target = batch
        left = left + 1 if batch_idx % 3 == 2 else left
        return super().training_step(((left, right), target), batch_idx)


class InPlace(ExportableModel):
    """Changes one of them in place in every third step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx % 3 == 2:
            batch[0][1].mul_(0.5)
        return super().training_step(batch, batch_idx)


class Twice(ExportableModel):
    """Calls the forward twice, the second time with other samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (left, right), _ = batch
        first = super().training_step(batch, batch_idx)
        return first + self(left.flip(0), right).square().mean() * 0.1


class Reused(ExportableModel):
    """Is given its first batch again, by a step that keeps it."""

    first: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.first = self.first or batch
        return super().training_step(self.first if batch_idx % 2 else batch, batch_idx)


MOST = [None, True, True, True]
"""Of an epoch of four batches."""


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (Plain, MOST * 3),
        (OfOthers, [None, True, False, None] * 3),
        (InPlace, [None, True, False, True] * 3),
        (Uncounted, [None, False, *[None] * 10]),
        (UncountedLate, [*MOST * 2, None, False, None, None]),
        (Twice, MOST * 3),
        (Reused, [None, False, None, False] * 3),
    ],
    ids=lambda each: each.__name__ if isinstance(each, type) else "",
)
def test_training_equals_one_device(
    build: type[ExportableModel], expected: list[bool | None], pool: WorkerPool
) -> None:
    training = Training(build, DataSpec(num_inputs=2), num_steps=12)
    strategy = {"plan": PLAN, "num_microbatches": 4, "schedule": "gpipe"}
    ranks = pool.run(train_ahead, training, strategy, 2, num_ranks=2)
    assert_same_training([result for result, _ in ranks], train_one_device(training), "float64")
    assert ranks[0][1] == expected
    assert not ranks[1][1]


@pytest.mark.parametrize(
    ("trainer", "strategy", "num_ranks"),
    [
        ({"accumulate_grad_batches": 2}, {"plan": PLAN}, 2),
        ({"val_check_interval": 1, "num_sanity_val_steps": 0}, {"plan": PLAN}, 2),
        ({"limit_train_batches": 3}, {"plan": REPLICAS}, 3),
    ],
    ids=["accumulation", "validation between", "replicas"],
)
def test_trainers_equal_one_device(
    trainer: dict[str, Any], strategy: dict[str, Any], num_ranks: int, pool: WorkerPool
) -> None:
    training = Training(Plain, DataSpec(num_inputs=2), num_steps=7, trainer=trainer)
    asked = {"num_microbatches": 4, "schedule": "gpipe", **strategy}
    ranks = pool.run(train_ahead, training, asked, num_ranks, num_ranks=num_ranks)
    assert_same_training([result for result, _ in ranks], train_one_device(training), "float64")
    assert {*ranks[0][1]} == {None, True}


def test_planners_schedules_and_options_equal_one_device(pool: WorkerPool) -> None:
    """The plan that is made knows of it; under 1f1b nothing is sent ahead."""
    training = Training(Plain, DataSpec(num_inputs=2), num_steps=6, validate=False)
    expected = train_one_device(training)
    for schedule, guesses in (("gpipe", {None, True}), ("1f1b", set[Any]())):
        strategy = {"num_microbatches": 4, "schedule": schedule}
        ranks = pool.run(train_ahead, training, strategy, 2, num_ranks=2)
        assert_same_training([result for result, _ in ranks], expected, "float64")
        assert {*ranks[0][1]} == guesses


class _Run:
    """As much of a run as the question asks for."""

    is_alone = False
    settings = Settings()

    def __init__(self, module: ExportableModel, device: str = "cuda") -> None:
        self.module, self.device = module, torch.device(device)
        module._fabric = None
        self.module._trainer = type("T", (), {"datamodule": None})()  # type: ignore[assignment]


class Augmented(ExportableModel):
    """Draws on the device, in an order that must stay."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class Stateful(DataLoader[Any]):
    """Can be asked for where it is."""

    def state_dict(self) -> dict[str, Any]:
        return {}


def test_what_is_read_ahead() -> None:
    samples: Any = list(torch.zeros(4, 2))
    by_workers = DataLoader(samples, 2, num_workers=1)
    run: Any = _Run(Plain())
    assert loaders.can_look_ahead(by_workers, run)
    assert not loaders.can_look_ahead(DataLoader(samples, 2), run)
    assert not loaders.can_look_ahead(Stateful(samples, 2, num_workers=1), run)
    assert not loaders.can_look_ahead(iter(by_workers), run)
    on_cpu, augmented = _Run(Plain(), "cpu"), _Run(Augmented())
    assert not loaders.can_look_ahead(by_workers, on_cpu)  # type: ignore[arg-type]
    assert not loaders.can_look_ahead(by_workers, augmented)  # type: ignore[arg-type]


def test_a_batch_that_workers_have_read_is_seen() -> None:
    """By an attribute of torch's iterator, without which nothing would be read ahead."""
    samples: Any = list(torch.zeros(8, 2))
    loader = DataLoader(samples, 2, num_workers=1, multiprocessing_context="spawn")
    run: Any = _Run(Plain())
    iterator = iter(loader)
    batches = loaders.LeadingBatches(iterator, run)
    deadline_s = time.monotonic() + 240
    while not batches.has_next and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert batches.has_next
    assert len(list(iterator)) == 4  # its worker ends
    assert not loaders.LeadingBatches(iter(samples), run).has_next
