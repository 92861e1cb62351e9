"""The example that a model is captured with: a micro-batch, or a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpp.capture import CapturedModel
from lightning_gpp.capture.values.arguments import Arguments
from lightning_gpp.capture.values.samples import GraphInputs, Sample, first_sample
from lightning_gpp.gnn import (
    ChunkedModel,
    Chunks,
    GraphTrainingError,
    check_edges,
    check_in_chunks,
    partition,
    small_graph,
)
from lightning_gpp.strategy.cutting.graphs import graph_slices
from lightning_gpp.strategy.planning.planning import Example
from lightning_gpp.strategy.ranks.control import Control
from lightning_gpp.strategy.settings import FullGraph


@dataclass(frozen=True, slots=True)
class GraphCall:
    """A call of the forward with one graph.

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
        check_edges(edges, num_vertices)
        sizes = {size for parameter in module.parameters() for size in parameter.shape}
        example = small_graph(tensors, sizes)
        if example is None:
            return cls(tuple(args), dict(kwargs), tensors, None)
        small_args, small_kwargs = arguments.rebuild(example)
        return cls(tuple(small_args), dict(small_kwargs), tensors, example)


def model_in_chunks(
    asked: FullGraph,
    captured: CapturedModel,
    call: GraphCall,
    flags: Mapping[str, bool],
    control: Control,
) -> ChunkedModel:
    """All ranks: the model in chunks of the graph that it is called with.

    Rank 0 divides the graph and checks that every layer computes the same in chunks.

    Args:
        asked: what the user asked for.
        captured: the model.
        call: of its forward.
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
    tensors, example, chunks = call.tensors, call.example, None
    if control.is_leader:
        seed = torch.initial_seed() if asked.seed is None else asked.seed
        edges, num_vertices = the_graph(tensors)
        num_chunks = asked.num_chunks(control.num_ranks)
        chunks = partition(edges, num_vertices, num_chunks, seed % 2**31, asked.ways)
        check_in_chunks(captured, tensors, chunks.one_way(), flags, example)
    shared: Chunks = control.share(chunks, "waiting for rank 0's division of the graph")
    return ChunkedModel(captured, tensors, shared, asked.techniques, example)


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
            f"row per vertex; got {given}"
        )
    if found.num_graphs > 1:
        raise GraphTrainingError(
            f"full-graph training needs one graph, got a batch of {found.num_graphs}; use "
            'strategy="graphpipe", which cuts batches of graphs between graphs'
        )
    return tensors[f"{found.prefix}edge_index"], found.num_nodes


def example_of(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    unit_sizes: Callable[[int], Sequence[int]],
) -> Example:
    """The first samples of a call, as many as a micro-batch is likely to have.

    All of them where the arguments do not agree on what a sample is, as those of a graph; also
    where the forward turns out not to take some of their rows, as where samples are columns.

    Args:
        module: whose forward is called.
        args: of the call.
        kwargs: likewise, by name.
        unit_sizes: samples of each micro-batch for a number of samples.
    """
    with torch.inference_mode(False), torch.enable_grad():
        arguments = Arguments.of(module, args, kwargs)
        sample = first_sample(arguments.tensors(args, kwargs))
        total = max(1, sample.num_samples)
        units = unit_sizes(total)
        whole = arguments.rebuild(sample.fresh())
        if len(units) == 1:
            return Example(*whole, total, 1)
        first = _first_samples(sample, units[0])
        if first is None:
            return Example(*whole, None, 1)
        some = arguments.rebuild(replace(sample, tensors={**sample.tensors, **first}).fresh())
        return Example(*some, total, len(units), otherwise=Example(*whole, None, 1))


def _first_samples(sample: Sample, count: int) -> Mapping[str, Tensor] | None:
    """Tensors of the first samples; None where they cannot be cut off.

    The first dimension of every tensor has to go with the samples.
    """
    tensors, total = sample.tensors, sample.num_samples
    if sample.graphs is not None:
        slices = graph_slices(tensors, [count, total - count])
        if slices is None:
            return None
        return {name: slices[name].cut(t, 1)[0] for name, t in tensors.items()}
    rows = {name: tensor for name, tensor in tensors.items() if tensor.dim()}
    if any(t.layout is not torch.strided or len(t) % total for t in rows.values()):
        return None
    return {name: tensor[: len(tensor) // total * count] for name, tensor in rows.items()}
