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

CPU = torch.device("cpu")

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

    @property
    def written(self) -> set[str]:
        """Names of the arguments that it changes."""
        schema = self.function._schema
        found = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
        if schema.name == "aten::batch_norm" and self.arguments.get("training"):
            found |= {"running_mean", "running_var"}
        return found

    def run(
        self,
        tensors: Sequence[Tensor],
        arguments: Mapping[str, Any] | None = None,
        device: torch.device = CPU,
    ) -> tuple[Tensor, ...]:
        """The tensors that it makes.

        Args:
            tensors: what it reads.
            arguments: in place of its own, if given.
            device: in place of that of the export.
        """
        return tuple(tensors_of(self.result(tensors, arguments, device)))

    def result(
        self,
        tensors: Sequence[Tensor],
        arguments: Mapping[str, Any] | None = None,
        device: torch.device = CPU,
    ) -> Any:
        """What it returns."""
        function, own = self.function, self.arguments if arguments is None else arguments
        given: dict[str, Any] = {
            name: device if isinstance(value, torch.device) else filled(value, tensors)
            for name, value in own.items()
        }
        with torch.set_grad_enabled(self.is_recorded and torch.is_grad_enabled()):
            if function in _VIEWS:  # of a whole tensor: a part may need a copy
                return given["self"].reshape(given["size"])
            return function(**given)


_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


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
