"""A sparse adjacency among the arguments of a forward: as edges, which travel, and as a matrix.

The matrix is torch_geometric's ``adj_t``: entry (i, j) is the edge from vertex j to vertex i. Its
layers take it in the place of ``edge_index`` and ``edge_weight``. Most operations that capture and
messages need do not exist for sparse tensors, so the edges are the inputs of the captured graph;
the module itself, run for comparison, is given the matrix.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_gpp.capture.errors import CaptureError

_LAYOUTS = frozenset({torch.sparse_coo, torch.sparse_csr, torch.sparse_csc})

_Parts = tuple[Tensor, Tensor, Tensor, torch.layout]

# The matrix -> its version, and its parts as of then.
_known: Any = WeakTensorKeyDictionary()


class SparseAdjacency:
    """What stands for the type of the container in a structure."""

    PARTS = ("edge_index", "edge_weight", "vertices", "layout")


class SparseParts:
    """The parts of a matrix as one leaf.

    Args:
        parts: as :func:`parts_of` gives them.
    """

    def __init__(self, parts: _Parts) -> None:
        self.parts = parts


def is_adjacency(value: Any) -> bool:
    """Whether a value is a sparse matrix with a row and a column per vertex."""
    return (
        isinstance(value, Tensor)
        and value.layout in _LAYOUTS
        and value.dim() == 2
        and value.shape[0] == value.shape[1]
    )


def parts_of(matrix: Tensor) -> _Parts:
    """The edges of a matrix; the same objects every time while it does not change.

    Returns:
        Sources and targets, of shape (2, edges); values, of shape (edges,); a tensor of shape
        (vertices, 0), which takes no memory and tells how many there are; the layout.
    """
    known = _known.get(matrix)
    if known is not None and known[0] == matrix._version:
        parts: _Parts = known[1]
        return parts
    entries = matrix.to_sparse(layout=torch.sparse_coo).coalesce()
    edges = entries.indices().flip(0).contiguous()
    vertices = matrix.values().new_empty((len(matrix), 0))
    return _remembered(matrix, (edges, entries.values(), vertices, matrix.layout))


def adjacency(parts: Sequence[Any]) -> Tensor:
    """The matrix of some parts."""
    edges, weights, vertices, layout = parts
    size = (len(vertices), len(vertices))
    with torch.sparse.check_sparse_tensor_invariants(enable=True):  # type: ignore[no-untyped-call]
        entries = torch.sparse_coo_tensor(edges.flip(0), weights, size).coalesce()
        matrix = entries if layout is torch.sparse_coo else entries.to_sparse(layout=layout)
    _remembered(matrix, (edges, weights, vertices, layout))
    return matrix


def in_edges(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a layer with the edges in the place of the matrix.

    Its values are the ``edge_weight`` of a layer that takes one. Whether a layer that takes none
    makes use of them is for a comparison of the results to tell.
    """
    if not any(map(_is_taken_apart, (*args, *kwargs.values()))):
        return tuple(args), dict(kwargs)
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    for name, value in list(bound.arguments.items()):
        if _is_taken_apart(value):
            edges, weights, _, _ = parts_of(value)
            bound.arguments[name] = edges
            if "edge_weight" in bound.signature.parameters:
                bound.arguments.setdefault("edge_weight", weights)
    return bound.args, bound.kwargs


def refuse_matrix(value: Any, location: str) -> None:
    """Refuses a matrix that was taken apart where no layer takes edges in its place.

    Raises:
        CaptureError: the value is one.
    """
    if _is_taken_apart(value):
        raise CaptureError(
            f"{location} computes with the sparse adjacency itself; only layers of "
            "torch_geometric can take it in a captured forward: give them the matrix, or pass "
            "edge_index and edge_weight"
        )


def _is_taken_apart(value: Any) -> bool:
    return is_adjacency(value) and value in _known


def _remembered(matrix: Tensor, parts: _Parts) -> _Parts:
    _known[matrix] = (matrix._version, parts)
    return parts
