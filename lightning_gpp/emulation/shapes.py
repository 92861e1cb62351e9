"""Values that are shapes alone, so that models far larger than this machine can run.

Tensors are on torch's meta device: they have a type and a shape, and autograd runs on them, but
they hold no numbers. A stage makes outputs of the shapes that its graph has for the samples of the
micro-batch, which require gradients where the graph says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_gpp.graph import ModelGraph, TensorSpec, Value, Variation
from lightning_gpp.runtime.stage_run import StageCall, StageFunction

META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Made:
    """Values in the making: their tensors, and how to put them together."""

    kinds: Sequence[Value]
    tensors: Sequence[Tensor]
    samples: int

    @classmethod
    def of(cls, kinds: Sequence[Value], samples: int, microbatch_size: int) -> Made:
        """Values for a number of samples."""
        specs = [spec for kind in kinds for spec in kind.tensors]
        return cls(kinds, [_tensor(spec, samples, microbatch_size) for spec in specs], samples)

    def values(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The values, made of these tensors."""
        rest = iter(tensors)
        return [self._value(kind, [next(rest) for _ in kind.tensors]) for kind in self.kinds]

    def _value(self, kind: Value, tensors: list[Tensor]) -> Any:
        if len(tensors) == 1:
            return tensors[0]
        if not tensors:
            return self.samples if kind.variation is Variation.COUNT else None
        return tuple(tensors)


class _Compute(torch.autograd.Function):
    """Joins tensors to what they are made from, forward and backward."""

    @staticmethod
    def forward(ctx: Any, made: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.likes = [(tensor.shape, tensor.dtype) for tensor in inputs]
        ctx.mark_non_differentiable(*[t for t in made if not _is_differentiable(t)])
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        made = [torch.empty(shape, dtype=dtype, device=META) for shape, dtype in ctx.likes]
        return (None, *made)


def computed(made: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """New tensors as if they were computed from others."""
    found: Sequence[Tensor] = _Compute.apply(made, *inputs)  # type: ignore[no-untyped-call]
    return found


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def takes_gradient(leaf: Any) -> bool:
    """Whether something is a tensor that wants a gradient."""
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _tensor(spec: TensorSpec, samples: int, microbatch_size: int) -> Tensor:
    shape = list(spec.shape)
    if spec.batch_dim is not None:
        shape[spec.batch_dim] = shape[spec.batch_dim] * samples // microbatch_size
    return torch.empty(shape, dtype=getattr(torch, spec.dtype), device=META)


@dataclass(frozen=True, slots=True)
class ShapeStage:
    """A :class:`~lightning_gpp.runtime.stage_run.StageFunction` that computes shapes.

    Asking torch for the shape of every operator takes about as long as running small ones. The
    graph knows the shapes already: gradients find their way back to the inputs and parameters that
    want them. Where that does not say enough (inputs of other shapes than at capture, values that
    are more than tensors), the operators run after all.

    Attributes:
        function: the operators, for what shapes do not tell.
        graph: the model, with shapes at its micro-batch size.
        inputs: names of the values it takes.
        outputs: names of the values it returns.
        parameters: asked for those that it reads at every call.
    """

    function: StageFunction
    graph: ModelGraph
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: Callable[[], Sequence[Parameter]]

    def __call__(self, values: Sequence[Any], call: StageCall) -> Sequence[Any]:
        """The values that leave it."""
        made_of = [self.graph.values[name] for name in self.outputs]
        samples = self._samples(values)
        if samples is None or not all(map(is_one_tensor, made_of)):
            return self.function(values, call)
        made = Made.of(made_of, samples, self.graph.microbatch_size)
        if not torch.is_grad_enabled():
            return made.values(made.tensors)
        wanted = [p for p in self.parameters() if p.requires_grad]
        sources = [*(value for value in values if takes_gradient(value)), *wanted]
        return made.values(computed(made.tensors, sources) if sources else made.tensors)

    def _samples(self, values: Sequence[Any]) -> int | None:
        """Samples in the inputs; None where they are not what the graph knows of them."""
        found: set[int] = set()
        for name, value in zip(self.inputs, values, strict=True):
            known = self.graph.values[name]
            if not is_one_tensor(known) or not isinstance(value, Tensor):
                return None
            (spec,) = known.tensors
            samples = _samples_in(value, spec, self.graph.microbatch_size)
            if samples is None:
                return None
            if spec.batch_dim is not None:
                found.add(samples)
        return found.pop() if len(found) == 1 else None


def is_one_tensor(value: Value) -> bool:
    """Whether a value is a tensor whose shape follows from the number of samples."""
    return len(value.tensors) == 1 and value.variation in (Variation.SAMPLES, Variation.SAME)


def _samples_in(tensor: Tensor, spec: TensorSpec, microbatch_size: int) -> int | None:
    """Samples in a tensor; 0 if it has none, None if it has another shape."""
    shape, dim = list(tensor.shape), spec.batch_dim
    if dim is None or len(shape) != len(spec.shape):
        return 0 if shape == list(spec.shape) else None
    samples, rest = divmod(shape[dim] * microbatch_size, spec.shape[dim])
    shape[dim] = spec.shape[dim]
    return samples if not rest and shape == list(spec.shape) else None
