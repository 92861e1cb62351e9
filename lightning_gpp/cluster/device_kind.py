"""Kinds of devices as data: how fast they compute, read and start, and how much they hold.

Data sheets of common device kinds.

Peaks are NVIDIA's data sheets (V100 SXM2, A100 SXM4, H100 SXM5, H200 SXM), tensor-core numbers
without sparsity. No program reaches them. What is sustained is stated as a part of the peak:

- *compute* 0.7. Large matrix products were measured at 83 of 112.7 Tflop/s on V100 (Markidis et
  al., "NVIDIA Tensor Core Programmability, Performance & Precision", 2018: 0.74) and at 0.8 to 0.87
  of the peak on A100 and H100 (S. Bekman, "Machine Learning Engineering", maximum achievable matmul
  flops); layers of real models have smaller ones.
- *memory* 0.85. 750 of 900 GB/s on V100 (Jia et al., "Dissecting the NVIDIA Volta GPU Architecture
  via Microbenchmarking", 2018: 0.83), somewhat more on later ones.
- *launch* 5 us, assumed: the order of magnitude of a launch from a framework in eager mode.

Memory is in decimal bytes, 4 to 6 % less than what the cards have: a CUDA context needs the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """Speed and memory of a kind of device, for estimates.

    Attributes:
        name: torch's name of the device, as in :attr:`~lightning_gpp.cluster.Device.kind`, so that
            measured profiles and estimates of one kind meet.
        peak_flops_per_s: dtype -> floating-point operations per second on the data sheet, by the
            type that matrix products are computed in (``"float32"``; ``"tf32"`` and 16 bits:
            tensor cores, dense).
        peak_memory_bytes_per_s: memory bandwidth on the data sheet.
        memory_bytes: memory for parameters and activations; None where it is not known.
        compute_efficiency: part of the peak that large matrix products sustain.
        memory_efficiency: part of the memory bandwidth that long reads and writes sustain.
        launch_s: seconds that one kernel takes at least, however little it does.
        source: where the numbers come from, and which are measured or assumed.

    Raises:
        ValueError: a number makes no sense.
    """

    name: str
    peak_flops_per_s: Mapping[str, float] = field(hash=False)
    peak_memory_bytes_per_s: float
    memory_bytes: int | None = None
    compute_efficiency: float = 1.0
    memory_efficiency: float = 1.0
    launch_s: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        speeds = [*self.peak_flops_per_s.values(), self.peak_memory_bytes_per_s]
        parts = (self.compute_efficiency, self.memory_efficiency)
        is_right = min(speeds) > 0 and self.launch_s >= 0 and all(0 < part <= 1 for part in parts)
        if not self.peak_flops_per_s or not is_right:
            raise ValueError(
                f"device kind {self.name!r} needs peak_flops_per_s of at least one dtype and "
                "peak_memory_bytes_per_s, all above 0, compute_efficiency and memory_efficiency as "
                "parts of them, above 0 and at most 1, and launch_s of at least 0; got "
                f"{dict(self.peak_flops_per_s)}, {self.peak_memory_bytes_per_s:g}, {parts} and "
                f"{self.launch_s:g}; leave a device out that cannot compute"
            )

    def flops_per_s(self, dtype: str) -> float:
        """Sustained floating-point operations per second of matrix products in a dtype.

        Raises:
            ValueError: the dtype's speed is not known.
        """
        if dtype not in self.peak_flops_per_s:
            known = ", ".join(self.peak_flops_per_s)
            raise ValueError(
                f"how fast {self.name!r} computes in {dtype} is not known, only: {known}; add it "
                "to peak_flops_per_s of the device kind"
            )
        return self.peak_flops_per_s[dtype] * self.compute_efficiency

    @property
    def memory_bytes_per_s(self) -> float:
        """Sustained memory bandwidth."""
        return self.peak_memory_bytes_per_s * self.memory_efficiency


V100_16GB = "Tesla V100-SXM2-16GB"
A100_40GB = "NVIDIA A100-SXM4-40GB"
A100_80GB = "NVIDIA A100-SXM4-80GB"
H100_80GB = "NVIDIA H100 80GB HBM3"
H200 = "NVIDIA H200"

GPU_COMPUTE_EFFICIENCY = 0.7
GPU_MEMORY_EFFICIENCY = 0.85
GPU_LAUNCH_S = 5e-6


_A100 = {"float64": 9.7, "float32": 19.5, "tf32": 156.0, "float16": 312.0, "bfloat16": 312.0}
_HOPPER = {"float64": 34.0, "float32": 67.0, "tf32": 494.5, "float16": 989.5, "bfloat16": 989.5}

_V100 = {"float64": 7.8, "float32": 15.7, "float16": 125.0}

_SHEETS = (
    (V100_16GB, _V100, 900, 16, "NVIDIA V100 data sheet (SXM2, 2018)"),
    (A100_40GB, _A100, 1555, 40, "NVIDIA A100 data sheet (SXM4 40 GB, 2020)"),
    (A100_80GB, _A100, 2039, 80, "NVIDIA A100 data sheet (SXM4 80 GB, 2021)"),
    (H100_80GB, _HOPPER, 3350, 80, "NVIDIA H100 data sheet (SXM5, 2023)"),
    (H200, _HOPPER, 4800, 141, "NVIDIA H200 data sheet (SXM, 2023)"),
)
"""Name, Tflop/s by type, memory bandwidth in GB/s, memory in GB, where the peaks are from."""

DEVICE_KINDS: Mapping[str, DeviceKind] = MappingProxyType(
    {
        name: DeviceKind(
            name=name,
            peak_flops_per_s=MappingProxyType({k: v * 1e12 for k, v in teraflops.items()}),
            peak_memory_bytes_per_s=gb_per_s * 1e9,
            memory_bytes=memory_gb * 10**9,
            compute_efficiency=GPU_COMPUTE_EFFICIENCY,
            memory_efficiency=GPU_MEMORY_EFFICIENCY,
            launch_s=GPU_LAUNCH_S,
            source=f"peaks: {sheet}; efficiencies: {__name__}; launch: assumed",
        )
        for name, teraflops, gb_per_s, memory_gb, sheet in _SHEETS
    }
)
"""Device kinds by name."""


def data_sheets(own: Iterable[DeviceKind] = ()) -> dict[str, DeviceKind]:
    """The known kinds by name, with those of a cluster in their place or beside them."""
    return {**DEVICE_KINDS, **{kind.name: kind for kind in own}}
