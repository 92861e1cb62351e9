"""By which backend ranks talk: all of them come to the same answer."""

from __future__ import annotations

import pytest
import torch

from lightning_gpp.runtime.processes.groups import RankDevice, common_backend

CPU = RankDevice("cpu", "host a")
ELSEWHERE = RankDevice("cpu", "host b")
GPU = RankDevice("cuda", "GPU-1")
OTHER_GPU = RankDevice("cuda", "GPU-2")


@pytest.mark.parametrize(
    ("ranks", "backend"),
    [
        ((CPU, CPU, CPU), "gloo"),
        ((CPU,), "gloo"),
        ((CPU, ELSEWHERE), "gloo"),
        ((GPU, OTHER_GPU), "nccl"),
        ((GPU, OTHER_GPU, CPU), "gloo"),
        ((CPU, GPU), "gloo"),
        ((GPU, OTHER_GPU, GPU), "gloo"),  # NCCL refuses two ranks on one GPU
    ],
)
def test_the_backend_of_some_ranks(ranks: tuple[RankDevice, ...], backend: str) -> None:
    assert common_backend(ranks) == backend
    assert common_backend(ranks[::-1]) == backend


def test_processes_of_one_host_know_each_other() -> None:
    here = RankDevice.of(torch.device("cpu"))
    assert here == RankDevice.of(torch.device("cpu")) and here.identity
