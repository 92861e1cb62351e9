"""By which wire ranks talk: all of them come to the same answer."""

from __future__ import annotations

import pytest
import torch

from lightning_gpp.runtime.processes.rank_devices import RankDevice, Wire, choose_wire

CPU = RankDevice("cpu", "host a")
ELSEWHERE = RankDevice("cpu", "host b")
GPU = RankDevice("cuda", "GPU-1")
OTHER_GPU = RankDevice("cuda", "GPU-2")


@pytest.mark.parametrize(
    ("ranks", "wire"),
    [
        ((CPU, CPU, CPU), Wire.SHARED_MEMORY),
        ((CPU,), Wire.SHARED_MEMORY),
        ((CPU, ELSEWHERE), Wire.GLOO),
        ((GPU, OTHER_GPU), Wire.DEVICES),
        ((GPU, OTHER_GPU, CPU), Wire.GLOO),
        ((CPU, GPU), Wire.GLOO),
        ((GPU, OTHER_GPU, GPU), Wire.GLOO),  # NCCL refuses two ranks on one GPU
    ],
)
def test_the_wire_of_some_ranks(ranks: tuple[RankDevice, ...], wire: Wire) -> None:
    assert choose_wire(ranks) is wire
    assert choose_wire(ranks[::-1]) is wire


def test_processes_of_one_host_know_each_other() -> None:
    here = RankDevice.of(torch.device("cpu"))
    assert here == RankDevice.of(torch.device("cpu")) and here.identity
