"""Averages of weights (EMA, SWA) are those of one device, on stages too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.modules import WIDTH, CaseData, CaseModule
from helpers.alike import differences
from helpers.training import make_trainer, quiet, real_tensors
from helpers.workers import WorkerPool
from lightning.pytorch import callbacks as pc
from torch import nn

AVERAGING: dict[str, Callable[[], pc.Callback]] = {
    "exponential": lambda: pc.EMAWeightAveraging(decay=0.9),
    "all weights": lambda: pc.WeightAveraging(use_buffers=False),
    "at the end": lambda: pc.StochasticWeightAveraging(0.1, swa_epoch_start=1),
}


class NormalizedModule(CaseModule):
    """With batch normalisation, whose statistics SWA computes anew in an epoch of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Tanh())


def averaged(
    name: str, strategy: dict[str, Any] | None, num_ranks: int, folder: str, normalizes: bool
) -> dict[str, Any]:
    """Trains, resumes from a checkpoint in the middle, and what there is at the end.

    The checkpoint is written before ranks make their module whole, and read by fewer epochs' run.
    """
    build = NormalizedModule if normalizes else CaseModule
    data, num_epochs = CaseData(), 4
    with quiet():
        first = make_trainer(
            strategy,
            num_ranks,
            max_epochs=num_epochs,
            callbacks=[
                AVERAGING[name](),
                pc.ModelCheckpoint(folder, "{epoch}", every_n_epochs=1, save_top_k=-1),
            ],
            enable_checkpointing=True,
        )
        module = build().double()
        first.fit(module, data.loader(1), data.loader(2))
        again = make_trainer(
            strategy, num_ranks, max_epochs=num_epochs, callbacks=[AVERAGING[name]()]
        )
        resumed = build().double()
        again.fit(resumed, data.loader(1), data.loader(2), ckpt_path=f"{folder}/epoch=2.ckpt")
    metrics = {key: float(value) for key, value in first.callback_metrics.items()}
    return {"whole": real_tensors(module), "resumed": real_tensors(resumed), "metrics": metrics}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "num_ranks", "normalizes"),
    [
        ("exponential", 3, False),
        ("all weights", 2, False),
        ("at the end", 3, False),
        ("at the end", 2, True),
    ],
)
def test_as_on_one_device(
    pool: WorkerPool, tmp_path: Path, name: str, num_ranks: int, normalizes: bool
) -> None:
    strategy = {"num_microbatches": 1 if normalizes else 4, "plan": PLANS[num_ranks]}
    arguments = (str(tmp_path / "ranks"), normalizes)
    found = pool.run(averaged, name, strategy, num_ranks, *arguments, num_ranks=num_ranks)
    expected = averaged(name, None, 1, str(tmp_path / "one"), normalizes)
    assert not differences(found[0], expected, "rank 0", 1e-9)
    for rank, each in enumerate(found):
        assert not differences(each["metrics"], expected["metrics"], f"rank {rank}", 1e-9)
    ours = torch.load(tmp_path / "ranks" / "epoch=3.ckpt", weights_only=False)
    theirs = torch.load(tmp_path / "one" / "epoch=3.ckpt", weights_only=False)
    for key in ("state_dict", "current_model_state", "averaging_state", "callbacks"):
        assert (key in ours) == (key in theirs)
        if key != "callbacks" and key in theirs:
            assert not differences(ours[key], theirs[key], key, 1e-9)
    if name == "at the end":
        (state,) = (v for k, v in theirs["callbacks"].items() if "Stochastic" in k)
        (other,) = (v for k, v in ours["callbacks"].items() if "Stochastic" in k)
        model = "average_model_state"
        assert not differences(other[model], state[model], "average", 1e-9)


PLANS = {
    2: [["left", "right"], ["fuse", "norm", "head"]],
    3: [["left"], ["right"], ["fuse", "norm", "head"]],
}
