"""What is asked of devices; the accelerator here is one of Intel's whose functions are replaced."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_gpp.capture.checks.check import is_autocast
from lightning_gpp.capture.checks.rollback import rollback
from lightning_gpp.capture.tracing.trace import autocast_state
from lightning_gpp.common.torch_device import (
    device_name,
    forked_random,
    set_current,
    synchronize,
    widened,
    widest_float,
)
from lightning_gpp.runtime.executor import Run
from lightning_gpp.runtime.processes.rank_devices import RankDevice, device_backend
from lightning_gpp.schedule import Action
from lightning_gpp.simulate import SpanKind
from lightning_gpp.strategy.devices.devices_at_hand import DeviceAtHand, cluster_at_hand
from lightning_gpp.strategy.recording.recorder import StepRecorder
from lightning_gpp.strategy.state.held_elsewhere import HeldElsewhere

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


def of_an_executor(device: torch.device) -> None:
    executor = SimpleNamespace(device=device, pace=None)
    run: Any = SimpleNamespace(executor=executor, _forward=lambda *_: None, loss_start_ns=None)
    Run.perform_timed(run, Action.parse("0F0"))


def of_a_recorder(device: torch.device) -> None:
    recorder = StepRecorder(device)
    recorder.start()
    recorder.begin(SpanKind.FINISH)
    recorder.end()


@pytest.mark.parametrize("record", [of_an_executor, of_a_recorder])
def test_recording_waits_for_its_own_device_only(
    record: Callable[[torch.device], None],
    waits: list[torch.device],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank on a CPU does not wait for a GPU that its process has touched."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waits.append(device))
    record(CPU)
    assert waits == []
    record(XPU)
    assert waits == [XPU]


# Random numbers and autocast ---------------------------------------------------------------------


def test_random_states_of_every_accelerator_are_put_back(generators: list[Tensor]) -> None:
    before = list(generators)
    with rollback(nn.Module()):
        generators[:] = [torch.tensor([7]), torch.tensor([8])]
    assert generators == before
    with forked_random(XPU):
        generators[:] = [torch.tensor([7]), torch.tensor([8])]
    assert [int(state) for state in generators] == [7, 2]  # of this device alone


def test_random_states_of_the_cpu_alone() -> None:
    before = torch.get_rng_state()
    for device in (CPU, META):
        with forked_random(device):
            torch.rand(1)
        assert torch.equal(torch.get_rng_state(), before)


def test_autocast_of_another_type_of_device(generators: list[Tensor]) -> None:
    assert not is_autocast()
    torch.set_autocast_enabled("xpu", True)
    try:
        assert is_autocast()
        assert [(s.device_type, s.enabled) for s in autocast_state()] == [
            ("cpu", False),
            ("xpu", True),
        ]
    finally:
        torch.set_autocast_enabled("xpu", False)


# What devices are --------------------------------------------------------------------------------


def test_a_device_with_memory_of_its_own(generators: list[Tensor]) -> None:
    found = DeviceAtHand.of(XPU)
    assert (found.name, found.kind, found.memory_bytes) == ("xpu:1", "Arc", 12 * GIB)
    assert found.identity == "UUID-1" == RankDevice.of(XPU).identity
    assert widest_float(XPU) is torch.float32


def test_an_apple_gpu_shares_the_memory_of_the_cpu() -> None:
    gpu, cpu = DeviceAtHand.of(MPS), DeviceAtHand.of(CPU)
    assert device_name(MPS) == "mps" and gpu.memory_bytes == cpu.memory_bytes
    assert gpu.memory_bytes is not None
    shares = [device.memory_bytes for device in cluster_at_hand([gpu, cpu]).devices]
    assert shares == [gpu.memory_bytes // 2] * 2
    assert RankDevice.of(MPS).identity != RankDevice.of(CPU).identity
    assert widest_float(MPS) is torch.float32


def test_the_cpu_knows_float64() -> None:
    assert widened(torch.ones(1)).dtype is torch.float64
    assert widened(torch.ones(1, device="meta")).dtype is torch.float64


def test_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [device_backend(device) for device in (CPU, META, MPS, XPU, torch.device("cuda:0"))]
    assert found == ["gloo", "gloo", "gloo", "xccl", "nccl"]
    monkeypatch.setitem(dist.Backend.default_device_backend_map, "xpu", "ours")
    assert device_backend(XPU) == "ours"


@pytest.mark.parametrize("device", [CPU, XPU, MPS, torch.device("cuda:0")])
def test_parameters_elsewhere_say_what_device_this_rank_has(device: torch.device) -> None:
    away = torch.empty(1, device="meta")
    with HeldElsewhere(device):
        kinds = [kind for kind in ("cpu", "cuda", "mps", "xpu") if getattr(away, f"is_{kind}")]
    assert kinds == [device.type]
