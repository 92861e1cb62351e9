"""With what the devices of a run are timed; the times here are made up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gpp.spmd.costs.machine import AlphaBeta
from lightning_gpp.strategy.spmd import measured_speeds

# Accelerators ------------------------------------------------------------------------------------

META = torch.device("meta")
MIB = 1 << 20


class Gpu:
    """An accelerator with the speeds of an H100: what it is given to do takes time of its own.

    Attributes:
        now_s: when it will have done everything.
        num_given: what it was given.
        num_waits: how often the host waited.
        others_s: what another process computes before the next call of one element.
    """

    launch_s, flops_per_s, bytes_per_s, cache_bytes = 5e-6, 52e12, 3e12, 50 * MIB

    def __init__(self) -> None:
        self.now_s, self.num_given, self.num_waits = 0.0, 0, 0
        self.others_s = 0.0

    def mm(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        filled = min(1.0, len(left) / 3000)  # smaller ones leave some of it idle
        self._do(2 * len(left) ** 3 / (self.flops_per_s * filled))

    def add(self, tensor: Tensor, other: int, out: Tensor | None = None) -> None:
        size_bytes = 2 * tensor.nbytes
        if tensor.numel() == 1:
            self.now_s, self.others_s = self.now_s + self.others_s, 0.0
        is_cached = size_bytes < self.cache_bytes
        self._do(size_bytes / (self.bytes_per_s * (4 if is_cached else 1)))

    def _do(self, seconds: float) -> None:
        self.num_given += 1
        self.now_s += max(seconds, self.launch_s)

    def synchronize(self, device: torch.device) -> None:
        self.num_waits += 1

    def event(self, device: torch.device, enable_timing: bool) -> GpuEvent:
        assert enable_timing
        return GpuEvent(self)


class GpuEvent:
    """The moment when a device comes to it."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def record(self, stream: Any) -> None:
        self.now_s = self.gpu.now_s

    def elapsed_time(self, end: GpuEvent) -> float:
        assert self.gpu.num_waits, "it may still be busy"
        return (end.now_s - self.now_s) * 1e3


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """It computes what is on the device ``meta``."""
    gpu = Gpu()
    for name, function in {"mm": gpu.mm, "add": gpu.add, "Event": gpu.event}.items():
        monkeypatch.setattr(torch, name, function)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: None)
    monkeypatch.setattr(measured_speeds, "synchronize", gpu.synchronize)
    monkeypatch.setattr(measured_speeds, "is_accelerator", lambda device: device == META)
    return gpu


@pytest.mark.parametrize(
    ("line", "largest"),
    [
        (AlphaBeta(100e-6, 1 / 125e6), 4 * MIB),  # 1 Gbit/s: 34 ms
        (AlphaBeta(20e-6, 1 / 300e9), 64 * MIB),  # NVLink: 4 MiB take no longer than two small ones
    ],
)
def test_messages_are_as_large_as_shows_the_bandwidth(line: AlphaBeta, largest: int) -> None:
    sizes = []

    def seconds(size_bytes: int) -> float:
        sizes.append(size_bytes)
        return line.alpha_s + line.beta_s_per_byte * size_bytes

    found = measured_speeds.line_of(seconds)
    assert (found.alpha_s, found.beta_s_per_byte) == pytest.approx(
        (line.alpha_s, line.beta_s_per_byte)
    )
    assert max(sizes) == largest
