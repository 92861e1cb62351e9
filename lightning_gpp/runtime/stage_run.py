"""Runs a stage: its forward and backward for single micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from lightning_gpp.runtime.payload import tensors_in


@dataclass(frozen=True, slots=True)
class StageCall:
    """The settings of one call of a stage.

    Attributes:
        microbatch: number of the micro-batch.
        training: whether modules are in training mode.
        weights: parameters by canonical name that take the place of those that the modules hold;
            gradients go to them. None: all are the modules' own.
        chunk: which part of one graph the micro-batch is; None where it is none.
    """

    microbatch: int = 0
    training: bool = True
    weights: Mapping[str, Tensor] | None = None
    chunk: int | None = None


class StageFunction(Protocol):
    """The operators of a stage as a function of the values that enter it and of the call."""

    def __call__(self, values: Sequence[Any], call: StageCall) -> Sequence[Any]:
        """The values that leave it."""


@dataclass(frozen=True, slots=True)
class StageCode:
    """The code of a stage, and how to run it.

    Attributes:
        function: the operators.
        inputs: names of the values that it takes, in order.
        outputs: names of the values it returns, in order.
        recompute: whether only the inputs (and the states of random generators) are kept for the
            backward, which runs the forward again.
        keep_state: keeps the state that is changed once per mini-batch, however many micro-batches
            it has, and gives what puts it back; None where there is none.
    """

    function: StageFunction
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    recompute: bool = False
    keep_state: Callable[[], Callable[[], None]] | None = None


@dataclass(slots=True)
class Flight:
    """One micro-batch between its forward and its backward.

    Attributes:
        inputs: values that came in, by name; their tensors are leaves.
        outputs: values that go out, by name, with their autograd graph; let go in between.
        loss: the loss of this micro-batch, where it is computed for each of them.
        results: where gradients enter the outputs of the model, by name, where it is not.
    """

    inputs: dict[str, Any]
    outputs: dict[str, Any]
    loss: Tensor | None = None
    results: dict[str, list[GradientEdge | None]] = field(default_factory=dict)
    ends: dict[str, list[GradientEdge | None]] = field(default_factory=dict)
    roots: list[GradientEdge] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)

    def let_go(self) -> None:
        """Keeps of the outputs only where gradients enter; their data live on where needed."""
        self.ends, self.outputs = ends_of(self.outputs), {}

    def add_gradients(
        self, ends: Sequence[GradientEdge | None], gradients: Sequence[Tensor | None]
    ) -> None:
        """Takes gradients, where there are some, that enter at some ends."""
        for end, gradient in zip(ends, gradients, strict=True):
            if gradient is not None and end is not None:
                self.roots.append(end)
                self.gradients.append(gradient)

    def backward(self, *, retain_graph: bool = False) -> None:
        """Runs autograd from the loss and the outputs to parameters and inputs."""
        for tensor in tensors_in(list(self.inputs.values())):
            tensor.grad = None  # of an earlier backward through the same forward
        if self.loss is not None and self.loss.requires_grad:
            self.roots.append(get_gradient_edge(self.loss))
            self.gradients.append(torch.ones_like(self.loss))
        if self.roots:
            torch.autograd.backward(self.roots, self.gradients, retain_graph=retain_graph)
        self.roots, self.gradients = [], []

    def input_gradients(self, values: Sequence[str]) -> list[Tensor | None]:
        """Gradients of the tensors in some inputs; None where there is none."""
        return [tensor.grad for tensor in tensors_in([*map(self.inputs.__getitem__, values)])]


def ends_of(values: Mapping[str, Any]) -> dict[str, list[GradientEdge | None]]:
    """Where gradients enter the tensors in some values, by name."""
    ends: dict[str, list[GradientEdge | None]] = {}
    for name, value in values.items():
        tensors = [value] if isinstance(value, Tensor) else tensors_in([value])
        ends[name] = [get_gradient_edge(t) if t.requires_grad else None for t in tensors]
    return ends


def run_forward(
    code: StageCode, inputs: Mapping[str, Any], call: StageCall, *, has_backward: bool
) -> Flight:
    """Runs a stage for one micro-batch.

    Args:
        code: the stage.
        inputs: the values that enter it, by name.
        call: with what it runs, also where the backward runs it again.
        has_backward: whether a backward will follow.
    """
    values = [*map(inputs.__getitem__, code.inputs)]
    if code.recompute and has_backward:
        outputs = checkpoint(lambda *v: code.function(v, call), *values, use_reentrant=False)
    else:
        outputs = code.function(values, call)
    return Flight(dict(inputs), dict(zip(code.outputs, outputs, strict=True)))
