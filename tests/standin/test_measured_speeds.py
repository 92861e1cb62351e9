"""HAP's timing of a device, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.workers import WorkerPool

from lightning_gpp.spmd.costs.machine import DeviceSpeeds
from lightning_gpp.strategy.spmd import planners
from lightning_gpp.strategy.spmd.planners import measure_speeds


def timed() -> tuple[DeviceSpeeds, int, int]:
    """Speeds of a GPU; how often the host waited for it, and products and sums it was given."""
    from standin_gpus.waits import counts

    given = 0

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal given
            given += 1
            return function(*args, **kwargs)

        return call

    device = torch.device("cuda:0")
    with pytest.MonkeyPatch.context() as patch:
        for name, small in (("SIDE", 64), ("COPIED_BYTES", 1 << 16)):  # a CPU computes it
            patch.setattr(planners, f"_ACCELERATOR_{name}", small)
        patch.setattr(torch, "mm", counted(torch.mm))
        patch.setattr(torch, "add", counted(torch.add))
        counts()
        speeds = measure_speeds(device)
    return speeds, sum(counts().values()), given


def test_timing_a_gpu_waits_for_turns_and_not_for_calls(gpus: WorkerPool) -> None:
    """A wait after each would be more than there are products and sums."""
    [(speeds, num_waits, num_given)] = gpus.run(timed, num_ranks=1)
    assert 0 < num_waits < num_given / 2
    for measured in (speeds.flops_per_s, speeds.memory_bytes_per_s):
        assert measured.shape == (1,) and measured[0] > 0
