"""The intermediate form: a ``torch.fx.Graph`` with the user's modules as its targets.

Placeholders are the tensor arguments; ``call_module`` targets are qualified names; ``get_attr``
reads parameters and buffers by canonical name; every other constant (numbers, devices, tensors
that are neither parameter nor buffer) stands literally among the arguments. The output node
holds the flat leaves of what forward returned.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_gpp.capture.errors import GuardError, user_location
from lightning_gpp.capture.structure import Structure


@dataclass(frozen=True, slots=True)
class Trace:
    """One forward in one mode.

    Attributes:
        graph: as the module describes.
        output: structure of what forward returns; its leaves are the output node's arguments.
    """

    graph: fx.Graph
    output: Structure

    @property
    def outputs(self) -> tuple[Any, ...]:
        """A node or a constant per leaf of the output."""
        leaves: tuple[Any, ...] = tuple(self.graph.output_node().args[0])  # type: ignore[arg-type]
        return leaves


@dataclass
class Names:
    """Canonical (first) names of the modules, parameters and buffers of a module."""

    modules: dict[int, str] = field(default_factory=dict)
    tensors: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module) -> Names:
        """The names, by the id of what they name."""
        names = cls({id(item): name for name, item in module.named_modules()})
        for tensors in (module.named_parameters(), module.named_buffers()):
            names.tensors |= {id(tensor): name for name, tensor in tensors}
        return names

    def canonical(self, module: nn.Module) -> dict[str, str]:
        """Every name of a parameter or buffer of ``module`` -> its canonical name."""
        found = [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]
        return {name: self.tensors[id(tensor)] for name, tensor in found}


@dataclass
class Recorder:
    """Creates nodes that know where they come from.

    Every node's ``meta`` gets ``scope`` (the module whose forward made the call), ``location``
    (the user's line) and ``no_grad``.
    """

    scopes: list[str] = field(default_factory=lambda: [""])

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Nodes made meanwhile belong to the module ``name``."""
        self.scopes.append(name)
        try:
            yield
        finally:
            self.scopes.pop()

    def mark(self, node: fx.Node) -> fx.Node:
        """Fills in the node's ``meta``."""
        is_module = node.op == "call_module"
        node.meta["scope"] = str(node.target) if is_module else self.scopes[-1]
        node.meta["location"] = user_location()
        node.meta["no_grad"] = not torch.is_grad_enabled()
        return node


def guard(observed: Any, expected: Any, on_data: bool, location: str) -> None:
    """Node function: checks at run time a decision that the trace followed.

    Raises:
        GuardError: the decision comes out differently.
    """
    if isinstance(observed, Tensor):
        observed = observed.item()
    if observed != expected:
        what = "the data" if on_data else "the size of an input"
        raise GuardError(
            f"{location} depends on {what}: it saw {expected!r} when the model was captured and "
            f"sees {observed!r} now, so the captured graph does not fit",
            on_data=on_data,
        )


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Node function: applies a custom autograd function."""
    return function.apply(*args)  # type: ignore[no-untyped-call]


def identity(value: Any) -> Any:
    """Node function: gives a value a name of its own (a parameter that forward returns)."""
    return value


def rebuild(structure: Structure, *leaves: Any) -> Any:
    """Node function: puts a container together."""
    return structure.unflatten(leaves)
