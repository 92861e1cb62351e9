"""The work of an operator, independent of the device: operations, bytes, kernels.

The forward of an operator is described by lines ``fixed + per_sample * samples``; a device kind
turns them into seconds (:mod:`lightning_gpp.cost.roofline`).
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_DTYPE = "float32"


@dataclass(frozen=True, slots=True)
class Line:
    """A quantity that grows with the number of samples.

    Attributes:
        per_sample: growth per sample.
        fixed: part that does not grow.

    >>> Line(per_sample=2.0, fixed=10.0).at(4)
    18.0
    """

    per_sample: float = 0.0
    fixed: float = 0.0

    def __post_init__(self) -> None:
        if self.per_sample < 0 or self.fixed < 0:
            raise ValueError(f"work cannot be negative, got {self}")

    def at(self, num_samples: float) -> float:
        """Its value for so many samples."""
        return self.fixed + self.per_sample * num_samples

    def __add__(self, other: Line) -> Line:
        return Line(self.per_sample + other.per_sample, self.fixed + other.fixed)


@dataclass(frozen=True, slots=True)
class OpWork:
    """The work of one operator's forward.

    Attributes:
        flops: floating-point operations of its matrix products and convolutions (a product and a
            sum are two).
        moved_bytes: bytes that it reads and writes: inputs, outputs, and what it reads of its
            parameters (fixed: all of a matrix; per sample: rows of an embedding).
        activation_bytes: bytes that it keeps for its backward.
        num_kernels: kernels that it starts.
        dtype: type that the flops are computed in; a device kind must know it where there are any.
    """

    flops: Line = Line()
    moved_bytes: Line = Line()
    activation_bytes: Line = Line()
    num_kernels: int = 1
    dtype: str = DEFAULT_DTYPE
