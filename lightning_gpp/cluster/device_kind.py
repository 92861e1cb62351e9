"""Kinds of devices as data: how fast they compute, read and start, and how much they hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """What an estimate needs to know of a kind of device.

    Attributes:
        name: as :attr:`~lightning_gpp.cluster.Device.kind` has it; torch's name of a GPU, so that
            profiles measured on one and estimates for one meet.
        peak_flops_per_s: dtype -> floating-point operations per second on the data sheet, by the
            type that matrix products are computed in (``"float32"``; ``"tf32"`` and 16 bits:
            tensor cores, dense).
        peak_memory_bytes_per_s: memory bandwidth on the data sheet.
        memory_bytes: memory for parameters and activations; None where it is not known.
        compute_efficiency: part of the peak that large matrix products sustain.
        memory_efficiency: part of the memory bandwidth that long reads and writes sustain.
        launch_s: seconds that one kernel takes at least, however little it does.
        source: where the numbers are from, and what is measured, on the data sheet or assumed.

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
        if not self.peak_flops_per_s or min(speeds) <= 0 or self.launch_s < 0:
            raise ValueError(
                f"device kind {self.name!r} needs peak_flops_per_s of at least one dtype and "
                "peak_memory_bytes_per_s, all above 0, and launch_s of at least 0; got "
                f"{dict(self.peak_flops_per_s)}, {self.peak_memory_bytes_per_s:g} and "
                f"{self.launch_s:g}; leave a device out that cannot compute"
            )
        for name in ("compute_efficiency", "memory_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(
                    f"device kind {self.name!r}: {name} is a part of the peak, above 0 and at "
                    f"most 1, got {getattr(self, name)}"
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
