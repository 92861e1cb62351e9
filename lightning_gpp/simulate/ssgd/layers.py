"""Layer-wise profiles: what the DAG model of S-SGD knows of a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from lightning_gpp.planner import PlanRequest
from lightning_gpp.planner.step_time.gradients import GradientPiece, Gradients


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer, or an operator, of a network that is trained as a whole.

    Attributes:
        name: of the layer.
        forward_s: seconds of its forward for a device's mini-batch.
        backward_s: seconds of its backward.
        gradient_bytes: bytes of the gradients of its trained parameters.

    Raises:
        ValueError: a number is negative.
    """

    name: str
    forward_s: float
    backward_s: float
    gradient_bytes: float = 0.0

    def __post_init__(self) -> None:
        if min(self.forward_s, self.backward_s, self.gradient_bytes) < 0:
            raise ValueError(f"seconds and bytes of a layer cannot be negative, got {self}")


def model_layers(request: PlanRequest, samples: float) -> tuple[Layer, ...]:
    """The operators of a model as layers, in the order of its forward.

    A parameter that several operators read belongs to the first of them, whose backward is last.
    On devices of several kinds, every layer takes what it takes on the slowest.

    Args:
        request: the model, its costs and the kinds of devices.
        samples: of a device's mini-batch.
    """
    layers = [_kind_layers(request, samples, kind) for kind in request.cluster.kinds]
    return tuple(
        replace(
            same[0],
            forward_s=max(layer.forward_s for layer in same),
            backward_s=max(layer.backward_s for layer in same),
        )
        for same in zip(*layers, strict=True)
    )


def _kind_layers(request: PlanRequest, samples: float, kind: str) -> list[Layer]:
    """The same on devices of one kind."""
    costs = request.profile(samples, kind).operators
    graph = request.graph
    seen: set[str] = set()
    found = []
    for operator in graph:
        own = [graph.parameter[name] for name in operator.parameters if name not in seen]
        seen.update(operator.parameters)
        cost = costs[operator.name]
        size_bytes = sum(parameter.size_bytes for parameter in own if parameter.requires_grad)
        found.append(Layer(operator.name, cost.forward_s, cost.backward_s, size_bytes))
    return found


def layer_gradients(layers: Sequence[Layer]) -> Gradients:
    """The gradients of every layer that has some, in the order in which they come."""
    backwards = layers[::-1]
    ends_s = list(accumulate(layer.backward_s for layer in backwards))
    pieces = tuple(
        GradientPiece(layer.gradient_bytes, end_s)
        for layer, end_s in zip(backwards, ends_s, strict=True)
        if layer.gradient_bytes
    )
    return Gradients(pieces, ends_s[-1] if ends_s else 0.0)
