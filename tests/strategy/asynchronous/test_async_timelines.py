"""Recorded windows of asynchronous training: in the program's order, with the weights it says."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import lightning.pytorch as lp
import pytest
import torch
from helpers.training import MemoryLogger, make_trainer, quiet
from helpers.workers import WorkerPool
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpp import TimelineCallback
from lightning_gpp.schedule import Kind, Windows, most_ahead
from lightning_gpp.schedule.windows import version_differences
from lightning_gpp.simulate import SpanKind, Timeline
from lightning_gpp.simulate.recorded import timeline_actions

PLAN = [["left"], ["right"], ["join"]]


class Branches(lp.LightningModule):
    """Two layers beside each other, and one that joins them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.left, self.right, self.join = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.join(self.left(x) * self.right(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self(batch[0]) - batch[1]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)


@dataclass
class Recorded:
    """What a rank has after a fit.

    Attributes:
        timelines: first step -> timeline (rank 0).
        windows: rows of the actions of this rank, by hand from the schedule.
        differences: stage -> updates between forward and backward, by the schedule.
        logged: rows of the logger (rank 0).
        per_update: batches of an update that the plan expects (rank 0).
        is_on: whether the recorder still is, after the fit.
        in_pipeline_s: seconds of batches that are no user's.
    """

    timelines: dict[int, Timeline]
    windows: list[list[str]] = field(default_factory=list)
    differences: dict[int, int] = field(default_factory=dict)
    logged: list[dict[str, float]] = field(default_factory=list)
    per_update: int | None = None
    is_on: bool = True
    in_pipeline_s: float = 1.0


class Expect(lp.Callback):
    """Asks the schedule, not the run, what every window of an epoch of some batches is."""

    def __init__(self, found: Recorded, count: int) -> None:
        self.found, self.count = found, count

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        run = trainer.strategy.session.run
        placed, found = run.built.placed, self.found
        windows = Windows(partial(placed.program, schedule="1f1b-async"), most_ahead(placed.stages))
        device = run.built.rank_of_device.index(trainer.global_rank)
        for number in range(self.count):
            window = windows.window(number, self.count - 1 - number)
            shift = number - window.number
            found.windows.append(
                [
                    f"{action.stage}{action.kind.value}{action.microbatch + shift}"
                    for action in window.actions(device)
                    if action.kind.is_compute
                ]
            )
        ahead = windows.most_ahead
        found.differences = version_differences(windows.window(ahead, ahead))
        found.is_on, found.in_pipeline_s = run.recorder.is_on, run.clock.seconds
        if (planned := run.built.planned) is not None:
            found.per_update = planned.request.held_versions.per_update


def fit(
    folder: str,
    steps: Any,
    *,
    count: int = 12,
    weights: str = "pipeoptim",
    **trainer: Any,
) -> Recorded:
    callback = TimelineCallback(steps, dirpath=folder)
    found = Recorded(callback.timelines)
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randn(4 * count, 4, generator=generator).double() for _ in range(2))
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    logger = MemoryLogger()
    with quiet():
        host = make_trainer(
            {"schedule": "1f1b-async", "weights": weights, "plan": PLAN, "timeout": 100.0},
            3,
            callbacks=[callback, Expect(found, count)],
            logger=logger,
            **{"max_epochs": 1} | trainer,
        )
        host.fit(Branches().double(), loader, loader)
    found.logged = logger.rows
    return found


def test_some_steps_in_a_row_are_one_timeline(pool: WorkerPool, tmp_path: Path) -> None:
    steps = range(4, 9)
    ranks = pool.run(fit, str(tmp_path), steps, val_check_interval=6, num_ranks=3)
    (timeline,) = ranks[0].timelines.values()
    assert timeline.step == 4 and timeline.num_minibatches == 5
    assert timeline.source == "measured"
    check_order(timeline, ranks, steps)
    check_versions(timeline, ranks[0].differences, first=4)
    (row,) = (row for row in ranks[0].logged if "timeline/minibatch_s" in row)
    assert row["step"] == 4
    assert 0 < row["timeline/minibatch_s"] < timeline.step_s
    assert row["timeline/step_s"] == pytest.approx(timeline.step_s)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["timeline.html", "timeline.png"]
    assert "before its backward" in (tmp_path / "timeline.html").read_text()
    assert not any(rank.is_on for rank in ranks)
    assert ranks[0].in_pipeline_s == 0  # steps run within windows, and cannot be told from them
    kinds = [span.kind for span in timeline.spans]
    assert kinds.count(SpanKind.OPTIMIZER) == 3 * 5 and kinds.count(SpanKind.LOSS) == 5
    assert SpanKind.DATA in kinds and SpanKind.VALIDATION in kinds


def test_an_update_of_several_mini_batches_is_counted_once(
    pool: WorkerPool, tmp_path: Path
) -> None:
    """2BW updates after every second batch here."""
    updates = {"weights": "2bw", "accumulate_grad_batches": 2}
    ranks = pool.run(fit, str(tmp_path), range(4, 6), count=16, num_ranks=3, **updates)
    (timeline,) = ranks[0].timelines.values()
    assert {span.updates for span in timeline.spans if span.updates is not None} >= {4, 5}
    assert ranks[0].per_update == 2


def check_order(timeline: Timeline, ranks: list[Recorded], steps: range) -> None:
    """What every rank computed is what the schedule says for these windows, in its order."""
    for rank, spans in enumerate(timeline_actions(timeline)):
        actions = [span.parsed for span in spans if span.parsed.kind.is_compute]
        found = [
            text
            for text, _ in groupby(
                f"{action.stage}{action.kind.value}{action.microbatch + steps.start}"
                for action in actions
            )
        ]
        assert found == [text for number in steps for text in ranks[rank].windows[number]]


def check_versions(timeline: Timeline, differences: dict[int, int], first: int) -> None:
    """A forward has seen as many updates less than its backward as the schedule says."""
    seen = {
        (span.stage, span.parsed.kind, span.microbatch): span.updates
        for span in timeline.spans
        if span.updates is not None
    }
    pairs = 0
    for (stage, kind, number), updates in seen.items():
        if kind is Kind.BACKWARD:
            assert stage is not None and number is not None
            assert updates == first + number
            if (forward := seen.get((stage, Kind.FORWARD, number))) is not None:
                assert updates - forward == differences[stage]
                pairs += 1
    assert set(differences.values()) == {0, 1} and pairs == 5 + 4 + 4


def test_a_timeline_ends_with_its_epoch(pool: WorkerPool, tmp_path: Path) -> None:
    """Steps 3 to 8 of epochs of six; the ninth one never comes."""
    ranks = pool.run(
        fit,
        str(tmp_path),
        [*range(3, 9), 40],
        count=6,
        max_epochs=2,
        num_ranks=3,
    )
    found = {step: t.num_minibatches for step, t in ranks[0].timelines.items()}
    assert found == {3: 3, 6: 3}
    assert (tmp_path / "timeline-step3.png").exists() and (tmp_path / "timeline-step6.png").exists()
