"""Layers of torch_geometric, opened: what they do besides passing messages.

A layer normalises edges by degrees, adds loops, multiplies by weights, and passes messages. The
first two belong to the whole graph, the third to every vertex by itself, and only the last one
mixes vertices, in ``propagate`` and ``edge_updater``. So a layer's forward is traced with these two
as single nodes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx, nn

from lightning_gpp.capture.errors import CaptureError, describe
from lightning_gpp.capture.operators.normalize import normalize, protect_inputs
from lightning_gpp.capture.operators.observe import Observer, observe
from lightning_gpp.capture.tracing.concrete_tracer import trace_concretely
from lightning_gpp.capture.tracing.keep_whole import LeafPolicy
from lightning_gpp.capture.tracing.trace import Trace
from lightning_gpp.capture.values.arguments import Arguments
from lightning_gpp.common.instance_attribute import instance_attribute
from lightning_gpp.gnn.errors import REMEDY, GraphTrainingError

MIXING_METHODS = ("propagate", "edge_updater")


def is_message_passing(module: nn.Module) -> bool:
    """Whether a module is a message-passing layer of torch_geometric."""
    library = sys.modules.get("torch_geometric.nn")
    return library is not None and isinstance(module, library.MessagePassing)


def is_layer(node: fx.Node, module: nn.Module) -> bool:
    """Whether a node calls a message-passing layer of ``module``."""
    return node.op == "call_module" and is_message_passing(module.get_submodule(str(node.target)))


DROPOUTS = frozenset({F.dropout, F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d})


def is_dropout(node: fx.Node, module: nn.Module) -> bool:
    """Whether a node drops features at random."""
    if node.op == "call_module":
        return isinstance(module.get_submodule(str(node.target)), nn.modules.dropout._DropoutNd)
    return node.target in DROPOUTS


class Mixing:
    """Node function: a method of a layer that reads vertices along edges.

    Args:
        layer: the layer.
        method: one of :data:`MIXING_METHODS`.
    """

    def __init__(self, layer: Any, method: str) -> None:
        self.layer, self.method = layer, method
        self.__name__ = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the method of the layer's class."""
        return getattr(type(self.layer), self.method)(self.layer, *args, **kwargs)

    def along(self, edges: Tensor, **kwargs: Any) -> Any:
        """The same for edges that are given as (sources, targets), whatever the layer's flow is."""
        with instance_attribute(self.layer, "flow", "source_to_target"):
            return self(edges, **kwargs)

    def sources_first(self, edge_index: Tensor) -> Tensor:
        """The edges of a layer as (sources, targets)."""
        return edge_index if self.layer.flow == "source_to_target" else edge_index.flip(0)

    def is_of_vertices(self, name: str) -> bool:
        """Whether an argument has a row per vertex, which messages take by their ends."""
        read = {*self.layer._user_args, *self.layer._edge_user_args}
        return not read.isdisjoint({f"{name}_i", f"{name}_j"})


@contextmanager
def without_caches(module: nn.Module) -> Iterator[None]:
    """What layers with ``cached=True`` keep of a graph is put away while the body runs."""
    with ExitStack() as stack:
        for layer in filter(is_message_passing, module.modules()):
            for name in [name for name in vars(layer) if name.startswith("_cached_")]:
                stack.enter_context(instance_attribute(layer, name, None))
        yield


def open_layer(
    layer: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], name: str
) -> tuple[Arguments, Trace]:
    """The arguments of a layer's forward, and its trace, normalised.

    Args:
        layer: in training mode.
        args: of its forward, as examples.
        kwargs: likewise.
        name: of the layer, for errors.

    Raises:
        GraphTrainingError: it cannot be traced.
    """
    try:
        arguments = Arguments.of(layer, args, kwargs)
        tensors = arguments.tensors(args, kwargs)
        methods = {method: Mixing(layer, method) for method in MIXING_METHODS}
        with without_caches(layer):
            trace = trace_concretely(
                layer, arguments, LeafPolicy.of(layer, ()), tensors, whole_methods=methods
            )
        observations = observe(trace.graph, tensors, Observer(layer))
        if protect_inputs(trace, observations):
            observations = observe(trace.graph, tensors, Observer(layer))
        trace = normalize(trace, observations)
    except CaptureError as error:
        raise GraphTrainingError(
            f"the layer {name} ({type(layer).__name__}) cannot run on chunks of vertices: "
            f"{describe(error)}; {REMEDY}"
        ) from error
    if not isinstance(trace.outputs[0], fx.Node):
        raise GraphTrainingError(f"the layer {name} ({type(layer).__name__}) returns a constant")
    return arguments, trace
