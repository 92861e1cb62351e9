"""How one tensor of a call is cut into pieces, and how gradients of the pieces are joined."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Slices:
    """Consecutive parts of a tensor.

    Attributes:
        dim: along which it is cut; None where every piece gets all of it.
        lengths: of the parts.
        shifts: what is subtracted from the entries of each part; nothing if there are none.
        overlap: entries that a part shares with the next one.
    """

    dim: int | None
    lengths: tuple[int, ...] = ()
    shifts: tuple[int, ...] = ()
    overlap: int = 0

    def cut(self, tensor: Tensor, num_pieces: int) -> list[Tensor]:
        """The part of every piece."""
        if self.dim is None:
            return [tensor] * num_pieces
        parts, start = [], 0
        for index, length in enumerate(self.lengths):
            part = tensor.narrow(self.dim, start, length + self.overlap)
            parts.append(part - self.shifts[index] if self.shifts else part)
            start += length
        return parts

    def joined(self, gradients: list[Tensor | None], whole: Tensor) -> Tensor | None:
        """The gradient of the whole tensor from those of its parts.

        Args:
            gradients: of the parts; None where a part has none.
            whole: what was cut, or a tensor like it.
        """
        found = [gradient for gradient in gradients if gradient is not None]
        if not found:
            return None
        if self.dim is None:
            return found[0] if len(found) == 1 else torch.stack(found).sum(0)
        shape = list(whole.shape)
        parts = []
        for gradient, length in zip(gradients, self.lengths, strict=True):
            shape[self.dim] = length
            parts.append(found[0].new_zeros(shape) if gradient is None else gradient)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.dim)
