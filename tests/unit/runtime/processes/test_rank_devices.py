"""By which wire ranks talk: all of them come to the same answer."""

from __future__ import annotations

import pytest
import torch

from lightning_gpp.runtime.processes.rank_devices import RankDevice, Wire, choose_wire
from lightning_gpp.runtime.transport.host_staging import HostStaging

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
        ((GPU, OTHER_GPU), Wire.NCCL),
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


def test_what_is_staged_is_a_copy_of_the_same_shape_and_type() -> None:
    staging = HostStaging(torch.device("cpu"))
    tensor = torch.arange(6, dtype=torch.bfloat16).view(2, 3).t()
    for copy in (staging.to_host(tensor), staging.to_device(tensor)):
        assert torch.equal(copy, tensor) and copy.dtype is tensor.dtype
        assert copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    assert staging.to_host(tensor).is_contiguous()
