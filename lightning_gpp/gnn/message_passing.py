"""Opens layers of torch_geometric: separates message passing from what is done per vertex.

A layer normalises edges by degrees, adds loops, multiplies by weights, and passes messages. The
first two belong to the whole graph, the third to every vertex by itself, and only the last one
mixes vertices, in ``propagate`` and ``edge_updater``. So a layer's forward is captured with these
two as single nodes.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx, nn

from lightning_gpp.capture.tracing.keep_whole import WholeMethod
from lightning_gpp.common.instance_attribute import instance_attribute, replaced

MIXING_METHODS = ("propagate", "edge_updater")


def mixing_methods(module: nn.Module) -> dict[str, list[Mixing]]:
    """The layers of a module by name, and what stays whole in each, to capture it with."""
    return {
        name: [Mixing(layer, method) for method in MIXING_METHODS]
        for name, layer in module.named_modules()
        if is_message_passing(layer)
    }


def is_message_passing(module: nn.Module) -> bool:
    """Whether a module is a message-passing layer of torch_geometric."""
    library = sys.modules.get("torch_geometric.nn")
    return library is not None and isinstance(module, library.MessagePassing)


DROPOUTS = frozenset({F.dropout, F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d})


def is_dropout(node: fx.Node, module: nn.Module) -> bool:
    """Whether a node drops features at random."""
    if node.op == "call_module":
        return isinstance(module.get_submodule(str(node.target)), nn.modules.dropout._DropoutNd)
    return node.target in DROPOUTS


class Mixing(WholeMethod):
    """Node function: a method of a layer that reads vertices along edges."""

    layer: Any

    def named(self, node: fx.Node) -> str:
        """The layer whose method a node calls, for errors."""
        return f"the layer {node.meta['layer'].name} ({type(self.layer).__name__})"

    def along(self, edges: Tensor, /, **kwargs: Any) -> Any:
        """The same for edges that are given as (sources, targets), whatever the layer's flow is."""
        with instance_attribute(self.layer, "flow", "source_to_target"):
            return self(edges, **kwargs)

    def is_of_vertices(self, name: str) -> bool:
        """Whether an argument has a row per vertex, which messages take by their ends."""
        read = {*self.layer._user_args, *self.layer._edge_user_args}
        return not read.isdisjoint({f"{name}_i", f"{name}_j"})


def without_caches(module: nn.Module) -> AbstractContextManager[None]:
    """Hides the caches of layers with ``cached=True`` while the body runs."""
    tables = [vars(layer) for layer in module.modules() if is_message_passing(layer)]
    caches = [(table, name) for table in tables for name in table if name.startswith("_cached_")]
    return replaced((*place, None) for place in caches)
