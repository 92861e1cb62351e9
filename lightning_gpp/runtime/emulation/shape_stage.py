"""A captured stage asked for shapes alone: what it would return, without running its operators.

Asking torch for the shape of every operator takes about as long as running small ones. The graph
knows the shapes already, so outputs are made of them for the samples that came in; gradients find
their way back to the inputs and parameters that want them. Where that does not say enough (inputs
of other shapes than at capture, values that are more than tensors), the operators run after all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_gpp.graph import ModelGraph, TensorSpec, Value, Variation
from lightning_gpp.runtime.emulation.shapes import Made, computed, takes_gradient
from lightning_gpp.runtime.stage_run import StageCall, StageFunction


@dataclass(frozen=True, slots=True)
class ShapeStage:
    """A :class:`~lightning_gpp.runtime.stage_run.StageFunction` that computes shapes.

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
