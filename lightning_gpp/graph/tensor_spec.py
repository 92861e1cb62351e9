"""Shape and type of a tensor, without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes of one element, by the name torch gives the type (without ``torch.``)."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and type of a tensor that need not exist yet.

    Attributes:
        shape: sizes seen when the model was captured with one micro-batch.
        dtype: torch's name of the element type, without ``torch.`` (``"float32"``).
        batch_dim: the dimension that grows with the number of samples; None when the
            tensor is the same size for every micro-batch.

    >>> TensorSpec((4, 16), "float32", batch_dim=0).size_bytes
    256
    """

    shape: tuple[int, ...]
    dtype: str
    batch_dim: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            known = ", ".join(ITEM_BYTES)
            raise ValueError(f"unknown dtype {self.dtype!r}; expected one of: {known}")
        if self.shape and min(self.shape) < 0:
            raise ValueError(f"sizes cannot be negative, got shape {list(self.shape)}")
        if self.batch_dim is not None and not 0 <= self.batch_dim < len(self.shape):
            raise ValueError(
                f"batch_dim must be a dimension of shape {list(self.shape)}, got {self.batch_dim}"
            )

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def size_bytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * self.item_bytes

    @property
    def is_differentiable(self) -> bool:
        """Whether a gradient can exist for it (floating point or complex)."""
        return self.dtype.startswith(("float", "bfloat", "complex"))
