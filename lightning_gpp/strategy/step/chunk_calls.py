"""Rank 0: calls of the forward that train on one graph, chunk by chunk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_gpp.capture import CapturedModel
from lightning_gpp.gnn import ChunkedModel, Chunks, GraphTrainingError
from lightning_gpp.strategy.cutting.cutting import Values, call_size
from lightning_gpp.strategy.settings import FullGraph


def chunk_order(asked: FullGraph, chunks: Chunks, step: int) -> tuple[int, ...]:
    """The order of the chunks in a step, which depends on nothing but the seed and the step."""
    if not asked.techniques.shuffle:
        return tuple(range(len(chunks)))
    seed = torch.initial_seed() if asked.seed is None else asked.seed
    generator = torch.Generator().manual_seed((seed + step) % 2**63)
    return tuple(torch.randperm(len(chunks), generator=generator).tolist())


def check_size(captured: CapturedModel, inputs: Mapping[str, Tensor], chunks: Chunks) -> None:
    """Checks that a call is of a graph of the size that was divided.

    Raises:
        GraphTrainingError: it is not.
    """
    found = call_size(captured, inputs)
    if found != chunks.num_vertices:
        raise GraphTrainingError(
            f"the first call of forward had a graph of {chunks.num_vertices} vertices, this one "
            f"has {'other inputs' if found is None else found}; full-graph training has one graph, "
            'use strategy="graphpipe" for several'
        )


def in_order(
    captured: CapturedModel, inputs: Mapping[str, Tensor], rows: Tensor
) -> dict[str, Tensor]:
    """The arguments of a call with their vertices in the order of the chunks.

    Args:
        captured: the forward.
        inputs: its arguments by name; those that stay on the stages are left as they are.
        rows: the vertices in that order.
    """
    graph = captured.graph
    return {
        name: tensor if name in graph.staying else _sorted(tensor, graph.batch_dims[name][0], rows)
        for name, tensor in inputs.items()
    }


def back_in_place(captured: CapturedModel, values: Values, rows: Tensor) -> dict[str, Any]:
    """The outputs of a call with their vertices where the caller has them."""
    places = torch.empty_like(rows)
    places[rows] = torch.arange(len(rows), device=rows.device)
    return {
        name: _each(value, captured.graph.batch_dims[name], places)
        for name, value in values.items()
    }


def _each(value: Any, dims: tuple[int | None, ...], places: Tensor) -> Any:
    leaves, spec = pytree.tree_flatten(value)
    of_tensors = iter(dims)
    placed = [
        _sorted(leaf, next(of_tensors), places) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    ]
    return pytree.tree_unflatten(placed, spec)


def _sorted(tensor: Tensor, dim: int | None, rows: Tensor) -> Tensor:
    return tensor if dim is None else tensor.index_select(dim, rows.to(tensor.device))


def sizes_in_order(chunked: ChunkedModel, order: tuple[int, ...]) -> list[int]:
    """Vertices of every chunk in an order."""
    return [chunked.chunks.sizes[chunk] for chunk in order]
