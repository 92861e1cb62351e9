"""Which modules stay whole: one operator each, not looked into."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

_WHOLE_PACKAGES = ("torch.nn.", "torch.ao.", "torch.jit.", "torch._dynamo.", "torch.fx.")
_GRAPH_LAYERS = "torch_geometric.nn."
_GRAPH_STACKS = ("models.", "sequential.", "module_dict.", "to_hetero_module.")
"""Modules of torch_geometric that are made of layers: one looks into them for operators."""
_OPENED: tuple[type[nn.Module], ...] = (
    *(nn.Sequential, nn.ModuleList, nn.ModuleDict),
    *(nn.TransformerEncoder, nn.TransformerDecoder, nn.Transformer),
)


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
    """

    types: tuple[type, ...] = ()
    names: frozenset[str] = frozenset()

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
        return cls(types + _message_passing(), names)

    def is_leaf(self, module: nn.Module, name: str) -> bool:
        """Whether ``module``, found under the qualified ``name``, stays whole."""
        if isinstance(module, self.types) or name in self.names:
            return True
        if module._backward_hooks or module._backward_pre_hooks:  # they see the module as a whole
            return True
        if module._compiled_call_impl is not None:  # so does ``module.compile()``
            return True
        if isinstance(module, _OPENED):
            return False
        package = f"{type(module).__module__}."
        if package.startswith(_GRAPH_LAYERS):
            return not package.removeprefix(_GRAPH_LAYERS).startswith(_GRAPH_STACKS)
        return package.startswith(_WHOLE_PACKAGES)


def _message_passing() -> tuple[type, ...]:
    nn_of_pyg = sys.modules.get("torch_geometric.nn")
    found = getattr(nn_of_pyg, "MessagePassing", None)
    return (found,) if isinstance(found, type) else ()
