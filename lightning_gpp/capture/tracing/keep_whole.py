"""Decides which modules stay whole: one operator each, not traced into.

Torch's own do, those that the user names, and those whose own Python decides what they compute.
Tracing freezes what Python decides. Where a decision can come out differently the next time (a
random number drawn by ``random`` or numpy, a number read out of a tensor, a branch on the data or
on the mode), the innermost module that takes it is kept as one operator, which decides anew at
every call. Only where the captured module itself decides is this an error.
"""

from __future__ import annotations

import ast
import functools
import linecache
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_gpp.capture.checks.observers import OBSERVED
from lightning_gpp.capture.errors import CaptureError

_WHOLE_PACKAGES = ("torch.nn.", "torch.ao.", "torch.jit.", "torch._dynamo.", "torch.fx.")
_GRAPH_LAYERS = "torch_geometric.nn."
_GRAPH_STACKS = ("models.", "sequential.", "module_dict.", "to_hetero_module.")
"""Modules of torch_geometric that are made of layers: one looks into them for operators."""
_OPENED: tuple[type[nn.Module], ...] = (
    *(nn.Sequential, nn.ModuleList, nn.ModuleDict),
    *(nn.TransformerEncoder, nn.TransformerDecoder, nn.Transformer),
)


class WholeMethod:
    """Node function: a method of a module, which is not looked into while its caller is.

    Args:
        layer: the module.
        method: name of the method.
    """

    def __init__(self, layer: nn.Module, method: str) -> None:
        self.layer, self.method, self.__name__ = layer, method, method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the method of the layer's class."""
        return getattr(type(self.layer), self.method)(self.layer, *args, **kwargs)


@dataclass(frozen=True, slots=True)
class LeafPolicy:
    """Decides whether a module is a leaf.

    Modules of torch are leaves, apart from containers and the transformer stacks, whose layers are
    the operators one wants to place. Layers of ``torch_geometric`` (message passing, norms,
    pooling) are leaves: they look at their callers and read sizes out of index tensors. Its
    ready-made models are opened like stacks.

    Attributes:
        types: further leaf types.
        names: further leaves by qualified name.
        opened: modules that are none, by qualified name, and what stays whole in each.
    """

    types: tuple[type, ...] = ()
    names: frozenset[str] = frozenset()
    opened: Mapping[str, Sequence[WholeMethod]] = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module, leaf_modules: Sequence[type | str]) -> LeafPolicy:
        """The policy for the user's list of leaf types and qualified names.

        Raises:
            ValueError: a name is not one of a sub-module.
        """
        types = tuple(item for item in leaf_modules if isinstance(item, type))
        names = frozenset(item for item in leaf_modules if isinstance(item, str))
        known = dict(module.named_modules(remove_duplicate=False))
        if unknown := sorted(names - known.keys()):
            raise ValueError(
                f"leaf_modules names {unknown}, which are no sub-modules of "
                f"{type(module).__name__}; its sub-modules are {sorted(known)[1:]}"
            )
        return cls(types, names)

    def is_leaf(self, module: nn.Module, name: str) -> bool:
        """Whether ``module``, found under the qualified ``name``, stays whole."""
        if isinstance(module, self.types) or name in self.names:
            return True
        # They see the module as a whole.
        if module._backward_hooks or module._backward_pre_hooks or module in OBSERVED:
            return True
        if module._compiled_call_impl is not None:  # so does ``module.compile()``
            return True
        if isinstance(module, _OPENED) or name in self.opened:
            return False
        package = f"{type(module).__module__}."
        if package.startswith(_GRAPH_LAYERS):
            return not package.removeprefix(_GRAPH_LAYERS).startswith(_GRAPH_STACKS)
        kinds = (f"{kind.__module__}.{kind.__name__}" for kind in type(module).__mro__)
        is_message_passing = f"{_GRAPH_LAYERS}conv.message_passing.MessagePassing" in kinds
        return is_message_passing or package.startswith(_WHOLE_PACKAGES)


class KeepWholeError(CaptureError):
    """A module makes a decision that a trace would fix.

    Attributes:
        scope: qualified name of the innermost module that decides; empty for the captured one.
        on_data: whether it decides by what is in its arguments, be it by other samples.
    """

    def __init__(self, message: str, scope: str, *, on_data: bool = False) -> None:
        super().__init__(message)
        self.scope, self.on_data = scope, on_data


class ModesDifferError(KeepWholeError):
    """It runs other operators in training than in evaluation."""


def host_state() -> Any:
    """State of the generators of ``random`` and numpy."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate()
    kind, keys, *rest = numpy.random.get_state()
    return random.getstate(), kind, keys.tobytes(), tuple(rest)


def is_of_library(location: str) -> bool:
    """Whether ``file:line`` is of a library that decides by the data for purposes of its own.

    Whether a mask masks anything, how many graphs there are: that changes nothing for a sample.
    """
    return any(f"/{package}/" in location for package in ("torch_geometric", "transformers"))


@functools.cache
def only_raises(location: str) -> bool:
    """Whether the statement at ``file:line`` is a check: it decides about an error only.

    Where it comes out differently than at capture, the module itself would raise.

    >>> only_raises("unknown line")
    False
    """
    filename, _, line = location.rpartition(":")
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:  # no Python file, or not as it was
        return False
    return any(
        node.test.lineno <= int(line) <= (node.test.end_lineno or node.test.lineno)
        and (isinstance(node, ast.Assert) or isinstance(node.body[-1], ast.Raise))
        and not any(isinstance(part, ast.BoolOp | ast.IfExp) for part in ast.walk(node.test))
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert | ast.If)
    )
