"""The model as a line of layers, as pipelines without branches see it.

GraphPipe's authors gave PipeDream their models like this, at the granularity of operators (arXiv
2406.17145, section 7.1).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from lightning_gpp.cost import Profile
from lightning_gpp.graph import ModelGraph
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.units.orders import candidate_orders
from lightning_gpp.planner.units.units import build_units, indivisible_groups


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers 0, 1, … with sums up to each, so that a run of layers costs one subtraction.

    Attributes:
        operators: operator names of each layer.
        compute_s: seconds of forward and backward of all layers before each, and of all.
        parameter_bytes: bytes of parameters likewise.
        activation_bytes: bytes kept for the backward likewise.
        num_single: layers that can have no replicas (they change state of the module) likewise.
    """

    operators: tuple[tuple[str, ...], ...]
    compute_s: tuple[float, ...]
    parameter_bytes: tuple[float, ...]
    activation_bytes: tuple[float, ...]
    num_single: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.operators)


def linear_layers(request: PlanRequest, microbatch_size: float) -> Layers:
    """The operators of the model in one line, in the order of the model.

    Operators that must be in one stage are one layer, and one that makes an output comes last.

    Args:
        request: the model and the devices; of unequal devices the slowest kind counts.
        microbatch_size: in samples.
    """
    profile = slowest_profile(request, microbatch_size)
    units = build_units(request.graph, profile, indivisible_groups(request.graph))
    order = candidate_orders(units)[0]
    operators = tuple(units.operators[unit] for unit in order)
    return Layers(
        operators=operators,
        compute_s=_sums(units.compute_s[unit] for unit in order),
        parameter_bytes=_sums(parameter_bytes(request.graph, names) for names in operators),
        activation_bytes=_sums(
            sum(profile.operators[name].activation_bytes for name in names) for names in operators
        ),
        num_single=_sums(
            any(request.graph.operator[name].state for name in names) for names in operators
        ),
    )


def slowest_profile(request: PlanRequest, microbatch_size: float) -> Profile:
    """The profile of the kind of device on which the model takes longest.

    For planners that know one kind only: what they promise then holds on all devices.
    """
    profiles = [request.profile(microbatch_size, kind) for kind in request.cluster.kinds]
    return max(
        profiles,
        key=lambda profile: sum(o.forward_s + o.backward_s for o in profile.operators.values()),
    )


def parameter_bytes(graph: ModelGraph, operators: Iterable[str]) -> int:
    """Bytes of the parameters that operators read, each once."""
    names = {name for operator in operators for name in graph.operator[operator].parameters}
    return sum(graph.parameter[name].size_bytes for name in names)


def _sums(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(accumulate(values, initial=0.0))
