"""What is asked of devices; the accelerator here is one of Intel's whose functions are replaced."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpp.capture.checks.rollback import rollback
from lightning_gpp.common.torch_device import (
    device_name,
    forked_random,
    set_current,
    synchronize,
    widest_float,
)
from lightning_gpp.runtime.processes.groups import RankDevice
from lightning_gpp.strategy.devices.devices_at_hand import DeviceAtHand, cluster_at_hand

CPU, META, XPU, MPS = map(torch.device, ("cpu", "meta", "xpu:1", "mps:0"))
GIB = 1 << 30


@pytest.fixture
def generators(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """States of two Intel GPUs' generators of random numbers."""
    states = [torch.tensor([1]), torch.tensor([2])]

    def set_state(state: Tensor, device: torch.device) -> None:
        states[device.index] = state

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    for name, function in {
        "is_initialized": lambda: True,
        "device_count": lambda: len(states),
        "get_rng_state": lambda device: states[device.index],
        "set_rng_state": set_state,
        "get_device_properties": lambda device: SimpleNamespace(
            name="Arc", uuid=f"UUID-{device.index}", total_memory=12 * GIB, has_fp64=False
        ),
    }.items():
        monkeypatch.setattr(torch.xpu, name, function)
    return states


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Devices that were waited for: their current streams, where they have several."""
    found: list[torch.device] = []

    def current_stream(device: torch.device) -> Any:
        return SimpleNamespace(synchronize=lambda: found.append(device))

    monkeypatch.setattr(torch.accelerator, "current_stream", current_stream)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: found.append(device))
    return found


# Waiting -----------------------------------------------------------------------------------------


def test_only_accelerators_are_waited_for_and_made_current(
    waits: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", current.append)
    for device in (CPU, XPU, META, MPS):
        synchronize(device)
        set_current(device)
    assert waits == current == [XPU, MPS]


# Random numbers and autocast ---------------------------------------------------------------------


def test_random_states_of_every_accelerator_are_put_back(generators: list[Tensor]) -> None:
    before = list(generators)
    with rollback(nn.Module()):
        generators[:] = [torch.tensor([7]), torch.tensor([8])]
    assert generators == before
    with forked_random(XPU):
        generators[:] = [torch.tensor([7]), torch.tensor([8])]
    assert [int(state) for state in generators] == [7, 2]  # of this device alone


# What devices are --------------------------------------------------------------------------------


def test_an_apple_gpu_shares_the_memory_of_the_cpu() -> None:
    gpu, cpu = DeviceAtHand.of(MPS), DeviceAtHand.of(CPU)
    assert device_name(MPS) == "mps" and gpu.memory_bytes == cpu.memory_bytes
    assert gpu.memory_bytes is not None
    shares = [device.memory_bytes for device in cluster_at_hand([gpu, cpu]).devices]
    assert shares == [gpu.memory_bytes // 2] * 2
    assert RankDevice.of(MPS).identity != RankDevice.of(CPU).identity
    assert widest_float(MPS) is torch.float32
