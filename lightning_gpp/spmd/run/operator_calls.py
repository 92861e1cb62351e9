"""ATen operator calls as data, which all ranks can run.

Rank 0 alone exports the model; the graph goes to the others as it is, so that all ranks run the
same operators by construction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from lightning_gpp.spmd.operator_graph import SpmdGraph, SpmdOperator
from lightning_gpp.spmd.program import Computation, Option
from lightning_gpp.spmd.run.moves import Mover, Shape

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Operand:
    """Stands for a tensor argument, by its index among the inputs."""

    index: int


class Name(str):
    """The name of a value, as opposed to a text argument."""

    __slots__ = ()


def with_operands(argument: Any, role: str, roles: list[tuple[str, str]]) -> Any:
    """An argument with operands in the place of names, which are added with what they are."""
    if isinstance(argument, Name):
        roles.append((str(argument), role))
        return Operand(len(roles) - 1)
    if isinstance(argument, list):
        return [with_operands(each, f"{role}[{i}]", roles) for i, each in enumerate(argument)]
    return argument


def overload(target: str) -> torch._ops.OpOverload:
    """The function that a target names."""
    found = attrgetter(target)(torch.ops)
    assert isinstance(found, torch._ops.OpOverload)
    return found


def call(
    function: torch._ops.OpOverload,
    arguments: Mapping[str, Any],
    tensors: Sequence[Tensor],
    device: torch.device = CPU,
    *,
    is_recorded: bool,
) -> Any:
    """What an operator returns.

    Args:
        function: the operator.
        arguments: by name, with operands in the place of tensors.
        tensors: that these stand for.
        device: in place of that of the export.
        is_recorded: whether autograd may record it.
    """
    given: dict[str, Any] = {
        name: device if isinstance(value, torch.device) else _filled(value, tensors)
        for name, value in arguments.items()
    }
    with torch.set_grad_enabled(is_recorded and torch.is_grad_enabled()):
        if function in _VIEWS:  # of a whole tensor: a part may need a copy
            return given["self"].reshape(given["size"])
        return function(**given)


_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def tensors_of(made: Any) -> list[Tensor]:
    """The tensors among what an operator returns, in order."""
    return [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor)]


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


# On the parts of one device ----------------------------------------------------------------------


def run_operator(
    graph: SpmdGraph, computation: Computation, mover: Mover, tensors: Sequence[Tensor]
) -> list[Tensor]:
    """This device's parts of the outputs of an operator.

    Args:
        graph: that it is of.
        computation: how it is run.
        mover: of this device.
        tensors: this device's parts of its inputs.

    Raises:
        RuntimeError: what it makes is of another size than its placement says, which would go
            wrong silently later.
    """
    operator, rank, shards = graph.operator_of[computation.operator], mover.rank, mover.shards
    whole = graph.value_of[operator.inputs[0]].shape if operator.inputs else ()
    results = [graph.value_of[name].shape for name in operator.outputs]
    expected = [shards.shape(w, p, rank) for w, p in zip(results, computation.outputs)]
    arguments = operator.attributes
    if computation.outputs and computation.outputs[0].is_shard:
        arguments = local_arguments(operator.kind, arguments, expected[0])
    if computation.option is Option.VOCABULARY:
        _, first, _ = shards.extent(whole, computation.inputs[0], rank)
        made = [_look_up_rows(tensors[0], tensors[1], first)]
    else:
        function, is_recorded = overload(operator.target), operator.is_recorded
        returned = call(function, arguments, tensors, mover.device, is_recorded=is_recorded)
        made = tensors_of(returned)
    if computation.option is Option.MEAN:  # of a device's elements, by their part of all
        made = [made[0] * (tensors[0].numel() / prod(whole))]
    for shape, tensor in zip(expected, made, strict=True):
        if tuple(tensor.shape) != shape:
            raise RuntimeError(
                f"operator {operator.name!r} ({operator.kind}) made "
                f"{tuple(tensor.shape)} on rank {rank}, but {shape} is this rank's part as "
                f"{', '.join(map(str, computation.outputs))}"
            )
    return made


def local_arguments(kind: str, arguments: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    """Arguments that name sizes of whole tensors, as sizes of a device's part.

    Args:
        kind: of the operator.
        arguments: for the whole tensors.
        shape: of the device's part of its output.

    >>> local_arguments("view", {"size": [4, 2, -1]}, (3, 2, 5))
    {'size': [3, 2, 5]}
    """
    local = dict(arguments)
    for name in ("size", "shape"):
        if isinstance(local.get(name), list) and len(local[name]) == len(shape):
            local[name] = list(shape)
    if kind == "unflatten":
        count = len(local["sizes"])
        start = local["dim"] % (len(shape) - count + 1)
        local["sizes"] = list(shape[start : start + count])
    return local


def _look_up_rows(weight: Tensor, indices: Tensor, first: int) -> Tensor:
    """A device's summand of look-ups in a table of which it has rows from ``first`` on.

    Rows of other devices count as zeros.
    """
    is_here = (indices >= first) & (indices < first + weight.shape[0])
    rows = F.embedding(torch.where(is_here, indices - first, 0), weight)
    # A row that stands in for one of another device gets a gradient of zeros.
    return torch.where(is_here.unsqueeze(-1), rows, torch.zeros((), dtype=rows.dtype))
