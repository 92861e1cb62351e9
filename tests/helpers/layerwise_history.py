"""Histories of a whole graph, layer by layer: what chunks compute one after the other, at once.

A layer reads of a vertex the value of this epoch if its chunk comes before, and the one out of the
history if it comes later. Both are known before the layer runs: the first are its inputs. So one
epoch of all chunks is one pass over the layers in which every edge is fresh or stale, at about the
cost of exact training. Chunks are needed where layers are on different devices, not to learn how
well such training learns. ``tests/unit/gnn/test_layerwise.py`` compares this with the package's
own chunks.

Gradients: an edge within a chunk gives one once, a fresh edge between chunks as often as the
techniques say, a stale edge none, or the one that it gave in the epoch before.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.nn import GCN2Conv, SAGEConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from lightning_gpp.common.instance_attribute import instance_attribute
from lightning_gpp.gnn import Chunks, Techniques
from lightning_gpp.gnn.history import UNBIASED

with warnings.catch_warnings():  # torch says once per process that compressed matrices are new
    warnings.simplefilter("ignore")
    torch.eye(1).to_sparse_csr()


class Pattern:
    """Where a matrix has entries; the values come later.

    Args:
        rows: (entries,) in any order; two entries may share a place, and add up.
        columns: (entries,) likewise.
        shape: of the matrix.
    """

    def __init__(self, rows: Tensor, columns: Tensor, shape: tuple[int, int]) -> None:
        self._as_given = _Compressed.of(rows, columns, shape)
        self._transposed = _Compressed.of(columns, rows, shape[::-1])

    def matrix(self, values: Tensor, *, transposed: bool = False) -> Tensor:
        """The matrix (or its transpose) with a value per entry."""
        found = self._transposed if transposed else self._as_given
        return torch.sparse_csr_tensor(
            found.starts, found.columns, values[found.order], found.shape, check_invariants=False
        )


@dataclass(frozen=True, slots=True)
class _Compressed:
    """Entries sorted by rows."""

    order: Tensor
    starts: Tensor
    columns: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, rows: Tensor, columns: Tensor, shape: tuple[int, int]) -> _Compressed:
        order = torch.argsort(rows * shape[1] + columns)
        starts = torch.zeros(shape[0] + 1, dtype=torch.long)
        starts[1:] = torch.bincount(rows, minlength=shape[0]).cumsum(0)
        return cls(order, starts, columns[order], shape)


class ByteDropout(nn.Module):
    """Dropout whose mask comes from random bytes, which are drawn several times as fast.

    Args:
        probability: a multiple of 1/256.
        seed: of the bytes.
    """

    def __init__(self, probability: float, seed: int) -> None:
        super().__init__()
        self._dropped = round(256 * probability)
        if self._dropped != 256 * probability or not 0 <= probability < 1:
            raise ValueError(f"probability is a multiple of 1/256 below 1, got {probability}")
        self._scale = 256 / (256 - self._dropped)
        self._draw = np.random.default_rng(seed)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        if not self.training or not self._dropped:
            return x
        drawn = np.frombuffer(self._draw.bytes(x.numel()), dtype=np.uint8).reshape(x.shape)
        return x * (torch.from_numpy(drawn >= self._dropped) * self._scale).to(x.dtype)


class SparseStem(nn.Module):
    """A linear layer on features of which few are not zero, dropout before it included.

    Args:
        linear: the layer.
        x: (vertices, features).
        dropout: before it.
    """

    def __init__(self, linear: nn.Linear, x: Tensor, dropout: nn.Module) -> None:
        super().__init__()
        self.linear, self.dropout = linear, dropout
        rows, columns = x.nonzero(as_tuple=True)
        self._values = x[rows, columns]
        self._pattern = Pattern(rows, columns, (x.shape[0], x.shape[1]))

    def forward(self, _: Tensor) -> Tensor:
        """(vertices, width), whatever it gets."""
        values = self.dropout(self._values)
        backward = self._pattern.matrix(values, transposed=True)
        found: Tensor = _Multiplied.apply(  # type: ignore[no-untyped-call]
            self.linear.weight.T, self._pattern.matrix(values), backward
        )
        return found + self.linear.bias


class _Multiplied(torch.autograd.Function):
    """A constant sparse matrix, given with its transpose, times a dense one."""

    @staticmethod
    def forward(ctx: Any, dense: Tensor, matrix: Tensor, transposed: Tensor) -> Tensor:
        ctx.transposed = transposed
        return matrix @ dense

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.transposed @ gradients[0].contiguous(), None, None


@dataclass
class Epoch:
    """What the layers multiply by in one epoch.

    Attributes:
        fresh: (targets, sources) of values of this epoch.
        stale: likewise, of values out of the history; None if there are none.
        gradients: (sources, targets) of the gradients of this epoch.
        last_gradients: likewise, of those of the epoch before; None if they are not used.
    """

    fresh: Tensor
    stale: Tensor | None
    gradients: Tensor
    last_gradients: Tensor | None


@dataclass
class LayerHistory:
    """What one layer keeps, all (vertices, width)."""

    values: Tensor
    stale: Tensor
    gradient: Tensor


class LayerwiseHistory:
    """Runs the layers of a network with histories.

    Args:
        edge_index: (2, edges) of the graph as the layers see it.
        weights: (edges,) that they multiply messages by.
        num_vertices: of the graph.
        chunks: of it; None trains exactly.
        techniques: how histories are used.
    """

    def __init__(
        self,
        edge_index: Tensor,
        weights: Tensor,
        num_vertices: int,
        chunks: Chunks | None,
        techniques: Techniques,
    ) -> None:
        self.techniques, self.weights = techniques, weights
        source, target = edge_index
        self._pattern = Pattern(target, source, (num_vertices, num_vertices))
        everything = torch.ones(edge_index.shape[1], dtype=torch.bool)
        self._exact = self._epoch(everything, everything)
        self._ends = None if chunks is None else chunks.assignment[edge_index]
        self._num_chunks = 1 if chunks is None else len(chunks)
        self._layers: dict[int, LayerHistory] = {}
        self._now = self._exact
        self._number = -1

    @classmethod
    def of(
        cls, net: nn.Module, edge_index: Tensor, chunks: Chunks | None, techniques: Techniques
    ) -> LayerwiseHistory:
        """For the layers of a network: those of GCNII, or GraphSAGE's with the mean."""
        num_vertices = int(edge_index.max()) + 1
        if chunks is not None:
            num_vertices = chunks.num_vertices
        dtype = next(net.parameters()).dtype
        if isinstance(layers(net)[0], GCN2Conv):
            edges, weights = gcn_norm(edge_index, None, num_vertices, dtype=dtype)
        else:
            edges, target = edge_index, edge_index[1]
            weights = 1 / torch.bincount(target, minlength=num_vertices).to(dtype)[target]
        return cls(edges, weights, num_vertices, chunks, techniques)

    def _epoch(self, fresh: Tensor, own: Tensor) -> Epoch:
        """Args: (edges,) which are fresh; which of them stay in a chunk."""
        historical, weights = self.techniques.historical_gradients, self.weights
        factor = torch.where(own | torch.tensor(historical), 1.0, UNBIASED).to(weights.dtype)
        stale = weights * ~fresh
        has_stale = not bool(fresh.all())
        return Epoch(
            self._pattern.matrix(weights * fresh),
            self._pattern.matrix(stale) if has_stale else None,
            self._pattern.matrix(weights * fresh * factor, transposed=True),
            self._pattern.matrix(stale, transposed=True) if has_stale and historical else None,
        )

    def begin_epoch(self, order: Sequence[int]) -> None:
        """A training pass over the chunks in this order begins."""
        if self._ends is None:
            return
        self._number += 1
        if self._number % self.techniques.refresh_every == 0:
            for layer in self._layers.values():
                layer.stale = layer.values
        place = torch.empty(self._num_chunks, dtype=torch.long)
        place[torch.tensor(order)] = torch.arange(self._num_chunks)
        source, target = place[self._ends]
        self._now = self._epoch(source <= target, source == target)

    @contextmanager
    def running(self, net: nn.Module, *, exact: bool, fills: bool = False) -> Iterator[None]:
        """The layers of a network run with histories in this.

        Args:
            net: the network.
            exact: all edges are fresh, and histories are left alone.
            fills: histories take what layers read then.
        """
        epoch = self._exact if exact else self._now
        with ExitStack() as stack:
            for number, layer in enumerate(layers(net)):
                run = partial(self._propagate, number, epoch, fills or not exact)
                stack.enter_context(instance_attribute(layer, "propagate", run))
                if isinstance(layer, GCN2Conv):
                    stack.enter_context(instance_attribute(layer, "normalize", False))
            yield

    def _propagate(
        self, number: int, epoch: Epoch, keeps: bool, edge_index: Tensor, x: Any, **_: Any
    ) -> Tensor:
        """In the place of a layer's own: (vertices, width) sums over edges."""
        read: Tensor = x[0] if isinstance(x, tuple) else x
        if keeps and number not in self._layers:
            zeros = torch.zeros_like(read)
            self._layers[number] = LayerHistory(zeros, zeros, zeros)
        layer = self._layers[number] if keeps else None
        found: Tensor = _Propagate.apply(read, epoch, layer)  # type: ignore[no-untyped-call]
        return found


class _Propagate(torch.autograd.Function):
    """One layer's sums over edges."""

    @staticmethod
    def forward(ctx: Any, read: Tensor, epoch: Epoch, layer: LayerHistory | None) -> Tensor:
        ctx.epoch, ctx.layer = epoch, layer
        found = epoch.fresh @ read
        if layer is not None:
            if epoch.stale is not None:
                found += epoch.stale @ layer.stale
            layer.values = read.detach()
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        epoch, layer = ctx.epoch, ctx.layer
        gradient = gradients[0].contiguous()
        found = epoch.gradients @ gradient
        if layer is not None:
            if epoch.last_gradients is not None:
                found += epoch.last_gradients @ layer.gradient
            layer.gradient = gradient
        return found, None, None


def layers(net: nn.Module) -> list[nn.Module]:
    """The message-passing layers of a network, in order.

    Raises:
        TypeError: it has others than those of GCNII and GraphSAGE, or none.
    """
    found = [m for m in net.modules() if hasattr(m, "propagate") and hasattr(m, "aggr_module")]
    if not found or not all(isinstance(layer, (GCN2Conv, SAGEConv)) for layer in found):
        raise TypeError("only layers of GCNII and GraphSAGE are known here")
    return found
