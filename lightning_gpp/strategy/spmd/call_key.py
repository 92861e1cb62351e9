"""What of a call of the forward is fixed by its export: another one needs another export."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


def call_key(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
    """Equal for two calls exactly if one export serves both.

    Args:
        module: whose forward is called.
        args: of the call.
        kwargs: likewise, by name.
    """
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    return (
        torch.is_grad_enabled(),
        tuple(part.training for part in module.modules()),
        tuple(parameter.requires_grad for parameter in module.parameters()),
        str(structure),
        tuple(_leaf(leaf) for leaf in leaves),
    )


def _leaf(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    return type(leaf).__name__, repr(leaf)
