"""Changes of placement, of values forwards and of their gradients backwards.

A gradient lies as the dual of its value. So the backward of ``source -> target`` is the move
``target.dual -> source.dual``, and there is nothing more to know: what is gathered forwards is
reduced and scattered backwards, what is cut is padded, what is summed is left as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gpp.spmd.placement import R_SUMMED
from lightning_gpp.spmd.program import Conversion, ReceiveInput, ReturnOutput
from lightning_gpp.spmd.run.collectives import Shape
from lightning_gpp.spmd.run.moves import Mover


@dataclass(frozen=True, slots=True)
class Converter:
    """Converts values and gradients on one device. ``whole`` are the sizes of the whole tensor.

    Attributes:
        mover: moves tensors.
    """

    mover: Mover

    def convert(self, part: Tensor, whole: Shape, conversion: Conversion) -> Tensor:
        """This device's part of a value in another placement."""
        source, target = conversion.source, conversion.target
        what = f"{conversion.value} {source} -> {target}"
        return self.mover.move(part, whole, source, target, conversion.method, what)

    def convert_back(self, gradient: Tensor, whole: Shape, conversion: Conversion) -> Tensor:
        """The gradient of the value that was converted."""
        source, target = conversion.source, conversion.target
        method = conversion.backward_method
        what = f"gradient of {conversion.value} {source} -> {target}"
        return self.mover.move(gradient, whole, target.dual, source.dual, method, what)

    def receive(
        self, given: Tensor | None, whole: Shape, dtype: torch.dtype, instruction: ReceiveInput
    ) -> Tensor:
        """This device's part of an argument of the forward, which rank 0 gives."""
        what = f"argument {instruction.value}, {instruction.placement}"
        return self.mover.from_root(given, whole, dtype, instruction.placement, what)

    def receive_back(
        self, gradient: Tensor, whole: Shape, instruction: ReceiveInput
    ) -> Tensor | None:
        """On rank 0 the gradient of an argument."""
        what = f"gradient of argument {instruction.value}, {instruction.placement}"
        return self.mover.to_root(gradient, whole, instruction.placement.dual, what)

    def give(self, part: Tensor, whole: Shape, instruction: ReturnOutput) -> Tensor | None:
        """On rank 0 a result of the forward."""
        source = instruction.placement
        return self.mover.to_root(part, whole, source, f"result {instruction.value}, {source}")

    def give_back(
        self,
        gradient: Tensor | None,
        whole: Shape,
        dtype: torch.dtype,
        device: torch.device,
        instruction: ReturnOutput,
    ) -> Tensor:
        """This device's part of a result's gradient, which rank 0 gives.

        Rank 0 has it whole, a summand of ``R``, with zeros elsewhere.
        """
        source = instruction.placement
        if source == R_SUMMED:
            is_root = self.mover.collectives.rank == 0
            zeros = torch.zeros(whole, dtype=dtype, device=device)
            return gradient if is_root and gradient is not None else zeros
        what = f"gradient of result {instruction.value}, {source}"
        return self.mover.from_root(gradient, whole, dtype, source.dual, what)
