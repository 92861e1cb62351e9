"""Calls of ATen operators as data that runs: what ranks other than 0 need to take part.

Rank 0 alone exports the model; the calls go to the others as they are, so that all ranks run the
same operators by construction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NestedArgument = Any
"""A constant, an :class:`Operand`, or a list of these."""


@dataclass(frozen=True, slots=True)
class Operand:
    """Stands for one of the tensors that an operator reads.

    Attributes:
        index: its place among the operator's inputs.
    """

    index: int


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """How an operator of the graph is called.

    Attributes:
        name: of the operator in the graph.
        target: the overload, as ``torch.ops`` has it (``"aten.view.default"``).
        arguments: by name of the schema, where given; in the order of the schema.
        is_recorded: whether autograd may record it; not in ``torch.no_grad()``.
    """

    name: str
    target: str
    arguments: Mapping[str, NestedArgument]
    is_recorded: bool = True

    @property
    def function(self) -> torch._ops.OpOverload:
        """The operator."""
        found: Any = torch.ops
        for part in self.target.split("."):
            found = getattr(found, part)
        assert isinstance(found, torch._ops.OpOverload)
        return found

    @property
    def is_random(self) -> bool:
        """Whether it draws random numbers."""
        if torch.Tag.nondeterministic_seeded not in self.function.tags:
            return False
        given = self.arguments
        is_off = given.get("dropout_p", 1.0) == 0.0 or given.get("p") == 0.0
        named = self.target.split(".")[1]
        never = named == "scaled_dot_product_attention" and "dropout_p" not in given
        return not (is_off or never or given.get("train") is False)

    def run(self, tensors: Sequence[Tensor], arguments: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """The tensors that it makes.

        Args:
            tensors: what it reads.
            arguments: in place of its own.
        """
        function = self.function
        positional, named = [], {}
        is_open = True
        for argument in function._schema.arguments:
            if argument.name not in arguments:
                is_open = False
                continue
            value = filled(arguments[argument.name], tensors)
            if is_open and not argument.kwarg_only:
                positional.append(value)
            else:
                named[argument.name] = value
        with torch.set_grad_enabled(self.is_recorded and torch.is_grad_enabled()):
            result = _ANY_STRIDES.get(function, function)(*positional, **named)
        return tuple(tensors_of(result))


_ANY_STRIDES = {
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default,
}
"""Views of a whole tensor may need a copy of a part, whose elements lie apart."""


def tensors_of(result: Any) -> Iterator[Tensor]:
    """The tensors among what an operator returns, in order."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, tuple | list):
        for each in result:
            yield from tensors_of(each)


def filled(argument: NestedArgument, tensors: Sequence[Tensor]) -> Any:
    """An argument with its tensors."""
    if isinstance(argument, Operand):
        return tensors[argument.index]
    if isinstance(argument, tuple | list):
        return type(argument)(filled(each, tensors) for each in argument)
    return argument
