"""Calls of ATen operators, which a graph has as data: what all ranks need to take part.

Rank 0 alone exports the model; the graph goes to the others as it is, so that all ranks run the
same operators by construction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from lightning_gpp.spmd.operator_graph import SpmdGraph, SpmdOperator

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Operand:
    """Stands for one of the tensors that an operator reads, by its place among the inputs."""

    index: int


def overload(target: str) -> torch._ops.OpOverload:
    """The function that a target names."""
    found = attrgetter(target)(torch.ops)
    assert isinstance(found, torch._ops.OpOverload)
    return found


def call(
    operator: SpmdOperator,
    tensors: Sequence[Tensor],
    arguments: Mapping[str, Any] | None = None,
    device: torch.device = CPU,
) -> tuple[Tensor, ...]:
    """The tensors that an operator makes.

    Args:
        operator: that is called.
        tensors: what it reads.
        arguments: in place of its own, if given.
        device: in place of that of the export.
    """
    own = operator.attributes if arguments is None else arguments
    function, is_recorded = overload(operator.target), operator.is_recorded
    return tuple(tensors_of(result(function, own, tensors, device, is_recorded=is_recorded)))


def result(
    function: torch._ops.OpOverload,
    arguments: Mapping[str, Any],
    tensors: Sequence[Tensor],
    device: torch.device = CPU,
    *,
    is_recorded: bool,
) -> Any:
    """What an overload returns."""
    given: dict[str, Any] = {
        name: device if isinstance(value, torch.device) else _filled(value, tensors)
        for name, value in arguments.items()
    }
    with torch.set_grad_enabled(is_recorded and torch.is_grad_enabled()):
        if function in _VIEWS:  # of a whole tensor: a part may need a copy
            return given["self"].reshape(given["size"])
        return function(**given)


_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def tensors_of(made: Any) -> Iterator[Tensor]:
    """The tensors among what an operator returns, in order."""
    if isinstance(made, Tensor):
        yield made
    elif isinstance(made, tuple | list):
        for each in made:
            yield from tensors_of(each)


def _filled(argument: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(argument, Operand):
        return tensors[argument.index]
    if isinstance(argument, list):
        return [_filled(each, tensors) for each in argument]
    return argument


def is_random(operator: SpmdOperator) -> bool:
    """Whether an operator draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in overload(operator.target).tags:
        return False
    given = operator.attributes
    is_off = given.get("dropout_p", 1.0) == 0.0 or given.get("p") == 0.0
    never = operator.kind == "scaled_dot_product_attention" and "dropout_p" not in given
    return not (is_off or never or given.get("train") is False)


def written_buffers(graph: SpmdGraph) -> set[str]:
    """Names of the buffers that operators change."""
    found = set()
    for operator in graph.operators:
        schema = overload(operator.target)._schema
        written = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
        if schema.name == "aten::batch_norm" and operator.attributes.get("training"):
            written |= {"running_mean", "running_var"}
        found |= {
            name for name, role in zip(operator.inputs, operator.arguments) if role in written
        }
    return found
