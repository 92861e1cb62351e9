"""From a model that is called with one graph to one that runs on chunks of its vertices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpp.capture import CapturedModel
from lightning_gpp.capture.values.arguments import Arguments
from lightning_gpp.capture.values.samples import GraphInputs
from lightning_gpp.gnn import (
    ChunkedModel,
    Chunks,
    GraphTrainingError,
    check_edges,
    check_in_chunks,
    partition,
    small_graph,
)
from lightning_gpp.strategy.ranks.control import Control
from lightning_gpp.strategy.settings import FullGraph


def model_in_chunks(
    asked: FullGraph,
    captured: CapturedModel,
    tensors: Mapping[str, Tensor],
    example: Mapping[str, Tensor] | None,
    flags: Mapping[str, bool],
    control: Control,
) -> ChunkedModel:
    """All ranks: the model in chunks of the graph that it is called with.

    Rank 0 divides the graph and checks that every layer computes the same in chunks.

    Args:
        asked: what the user asked for.
        captured: the model.
        tensors: arguments of its forward by name.
        example: those that it was captured with, if these are others.
        flags: training flags of the sub-modules in training mode.
        control: between the ranks.

    Raises:
        GraphTrainingError: the arguments are no single graph, or the model does not run in chunks,
            or the ways do not divide the ranks.
    """
    if control.num_ranks % asked.ways:
        raise GraphTrainingError(
            f"ways={asked.ways} has to divide the number of devices, which is {control.num_ranks}"
        )
    edges, num_vertices = the_graph(tensors)
    chunks: Chunks | None = None
    if control.is_leader:
        seed = torch.initial_seed() if asked.seed is None else asked.seed
        num_chunks = asked.num_chunks(control.num_ranks)
        chunks = partition(edges, num_vertices, num_chunks, seed % 2**31, asked.ways)
        check_in_chunks(captured, tensors, chunks.one_way(), flags, example)
    shared: Chunks = control.share(chunks, "waiting for rank 0's division of the graph")
    return ChunkedModel(captured, tensors, shared, asked.techniques, flags, example)


@dataclass(frozen=True, slots=True)
class GraphCall:
    """A call of a forward with one graph.

    Attributes:
        args: to capture the forward with.
        kwargs: likewise.
        tensors: of the call, by name.
        example: those among ``args`` and ``kwargs``, if these are others.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: Mapping[str, Tensor]
    example: Mapping[str, Tensor] | None

    @classmethod
    def of(cls, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> GraphCall:
        """Checks the graph, before the forward meets it, and takes a small one in its place.

        Raises:
            GraphTrainingError: there is none, or its edges are not of its vertices.
        """
        arguments = Arguments.of(module, args, kwargs)
        tensors = arguments.tensors(args, kwargs)
        edges, num_vertices = the_graph(tensors)
        if edges.is_meta:
            raise GraphTrainingError(
                "a graph is divided by its edges, of which the shape is not enough: emulate with "
                'tensors="real"'
            )
        check_edges(edges, num_vertices)
        sizes = {size for parameter in module.parameters() for size in parameter.shape}
        example = small_graph(tensors, sizes)
        if example is None:
            return cls(tuple(args), dict(kwargs), tensors, None)
        small_args, small_kwargs = arguments.rebuild(example)
        return cls(tuple(small_args), dict(small_kwargs), tensors, example)


def the_graph(tensors: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """The edges of the graph that a model is called with, and its number of vertices.

    Raises:
        GraphTrainingError: there is no graph among the tensors, or there are several.
    """
    found = GraphInputs.find(tensors)
    if found is None:
        given = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise GraphTrainingError(
            "full-graph training needs one graph: forward has to be called with a `Data`, or with "
            "tensors named `edge_index`, of shape (2, edges) and whole numbers, and `x`, with a "
            f"row per vertex, or with a sparse adjacency; got {given}"
        )
    if found.num_graphs > 1:
        raise GraphTrainingError(
            f"full-graph training needs one graph, got a batch of {found.num_graphs}; use "
            'strategy="graphpipe", which cuts batches of graphs between graphs'
        )
    return tensors[f"{found.prefix}edge_index"], found.num_nodes
