"""One stage at work: its forward and backward for single micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_gpp.runtime.payload import tensors_in


class StageFunction(Protocol):
    """The operators of a stage as a function of the values that enter it."""

    def __call__(self, values: Sequence[Any], *, training: bool) -> Sequence[Any]:
        """The values that leave it."""


@dataclass(frozen=True, slots=True)
class StageCode:
    """What a stage computes.

    Attributes:
        function: the operators.
        inputs: names of the values it takes, in order.
        outputs: names of the values it returns, in order.
    """

    function: StageFunction
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(slots=True)
class Flight:
    """One micro-batch between its forward and its backward.

    Attributes:
        inputs: values that came in, by name; their tensors are leaves.
        outputs: values that go out, by name, with their autograd graph.
        loss: the loss of this micro-batch, where it is computed.
    """

    inputs: dict[str, Any]
    outputs: dict[str, Any]
    loss: Tensor | None = None
    roots: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)

    def add_gradients(self, values: Sequence[str], gradients: Sequence[Tensor | None]) -> None:
        """Takes the gradients that came back for some outputs.

        Args:
            values: names of the outputs.
            gradients: one per tensor in them; None where the consumer has none.
        """
        tensors = tensors_in([self.outputs[name] for name in values])
        for tensor, gradient in zip(tensors, gradients, strict=True):
            if gradient is not None and tensor.requires_grad:
                self.roots.append(tensor)
                self.gradients.append(gradient)

    def backward(self, *, retain_graph: bool = False) -> None:
        """Runs autograd from the loss and the outputs to parameters and inputs."""
        if self.loss is not None and self.loss.requires_grad:
            self.roots.append(self.loss)
            self.gradients.append(torch.ones_like(self.loss))
        if self.roots:
            torch.autograd.backward(self.roots, self.gradients, retain_graph=retain_graph)

    def input_gradients(self, values: Sequence[str]) -> list[Tensor | None]:
        """Gradients of the tensors in some inputs; None where there is none."""
        return [tensor.grad for tensor in tensors_in([self.inputs[name] for name in values])]


def run_forward(code: StageCode, inputs: Mapping[str, Any], *, training: bool) -> Flight:
    """Runs a stage for one micro-batch."""
    outputs = code.function([inputs[name] for name in code.inputs], training=training)
    return Flight(dict(inputs), dict(zip(code.outputs, outputs, strict=True)))
