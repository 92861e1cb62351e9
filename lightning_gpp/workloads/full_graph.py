"""Deep networks on one graph, from the graph's statistics alone: no graph is needed.

As GNNPipe ran them (arXiv 2308.10087): a linear layer, ``layers`` message-passing layers of one
width, a linear layer. Samples are vertices; what passes along edges counts for the vertices in
proportion, as if all had as many neighbours. A layer is one operator, with activation function,
dropout, normalisation and residual.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from lightning_gpp.common.checks import check_counts, is_number
from lightning_gpp.cost import Line, OpWork
from lightning_gpp.graph import TensorSpec
from lightning_gpp.graph.graph_parallel import VertexShares, WaysGraph, in_ways
from lightning_gpp.workloads.layers import FLOAT_BYTES, INDEX_BYTES, ModelBuilder
from lightning_gpp.workloads.workload import Workload

REDDIT_VERTICES, REDDIT_EDGES = 232_965, 114_848_857

SOURCE = "GNNPipe (arXiv 2308.10087)"


@dataclass(frozen=True, slots=True)
class LayerWork:
    """Work of a layer beside reading the rows of neighbours.

    Attributes:
        products: square matrices that rows are multiplied by.
        kernels: that it starts.
        rows_moved: rows that they read and write, per vertex.
        rows_kept: rows that are kept for the backward, per vertex.
        reads_first: whether it also reads what the first layer made.
    """

    products: int
    kernels: int
    rows_moved: int
    rows_kept: int
    reads_first: bool = False

    def per_vertex(self, width: int, edge_bytes: float) -> OpWork:
        """The work of a layer of a width, with what it reads along the edges into a vertex."""
        return OpWork(
            flops=Line(2.0 * self.products * width**2),
            moved_bytes=Line(FLOAT_BYTES * self.rows_moved * width + edge_bytes),
            activation_bytes=Line(float(FLOAT_BYTES * self.rows_kept * width)),
            num_kernels=self.kernels,
        )


LAYER_WORK: Mapping[str, LayerWork] = MappingProxyType(
    {
        # product, sum over neighbours, ReLU, dropout
        "gcn": LayerWork(1, 4, 2 + 1 + 2 + 2, 3),
        # mean over neighbours, two products, their sum, ReLU, dropout
        "sage": LayerWork(2, 6, 1 + 4 + 3 + 2 + 2, 4),
        # sum over neighbours, first features mixed in, product, identity mixed in, ReLU, dropout
        "gcn2": LayerWork(1, 6, 1 + 3 + 2 + 3 + 2 + 2, 4, reads_first=True),
        # LayerNorm, ReLU, dropout, mean over neighbours, two products, their sum, residual
        "resgcn": LayerWork(2, 8, 2 + 2 + 2 + 1 + 4 + 3 + 3, 6),
    }
)
"""Layers by name, each listed with its kernels; a kernel reads its rows once and writes one."""

MIRROR_WAYS = 8
"""Over which mirrors are counted."""

HISTORY_ROWS = 3
"""Rows per vertex that a layer's :class:`lightning_gpp.gnn.history.History` takes."""


@dataclass(frozen=True)
class FullGraphWorkload(Workload):
    """A network on one graph, described by the graph's numbers.

    Attributes:
        mirrors: vertices whose rows another one of eight ways reads, over all pairs.
    """

    mirrors: float = 0.0

    def minibatch_size(self, num_devices: int) -> int:
        """All vertices, whatever the number of devices."""
        return self.samples_per_device

    def mirrors_of(self, num_ways: int) -> float:
        """Vertices whose rows another way reads, over all pairs of ways.

        From those of eight ways, as if neighbours were spread evenly: a way of twice as many
        vertices is read by whom either half is read.
        """
        num_vertices = self.samples_per_device
        unread = 1 - self.mirrors / (MIRROR_WAYS - 1) / num_vertices
        return float((num_ways - 1) * num_vertices * (1 - unread ** (MIRROR_WAYS / num_ways)))

    def shares(self, num_ways: int) -> VertexShares:
        """Vertices of equal ways, and what each exchanges with each other."""
        num_vertices, pairs = self.samples_per_device, num_ways * (num_ways - 1)
        rows = [
            (way + 1) * num_vertices // num_ways - way * num_vertices // num_ways
            for way in range(num_ways)
        ]
        count = round(self.mirrors_of(num_ways) / pairs) if pairs else 0
        ways = range(num_ways)
        return VertexShares(rows, {(a, b): count for a in ways for b in ways if a != b})

    def in_ways(self, num_ways: int, num_chunks: int) -> tuple[WaysGraph, dict[str, OpWork]]:
        """The model in ways, and the work of its operators per vertex of all ways together.

        Histories, which there are with several chunks, are told as activations: all forwards come
        before the backwards, so that those of all vertices are kept.
        """
        works = self.costs
        assert isinstance(works, Mapping)
        exchanged = {(op.name, op.inputs[0]) for op in self.graph if op.name.startswith("convs_")}
        model = in_ways(self.graph, self.shares(num_ways), exchanged)
        found = {operator.name: OpWork(num_kernels=0) for operator in model.graph}
        for name, (operator, _) in model.operators.items():
            work, history_bytes = works[operator], 0.0
            if num_chunks > 1 and operator.startswith("convs_"):
                (value,) = self.graph.operator[operator].outputs
                history_bytes = HISTORY_ROWS * value.size_bytes / self.samples_per_device
            kept = work.activation_bytes
            found[name] = replace(
                work,
                flops=_part(work.flops, num_ways),
                moved_bytes=_part(work.moved_bytes, num_ways),
                activation_bytes=_part(Line(kept.per_sample + history_bytes, kept.fixed), num_ways),
            )
        return model, found


def _part(line: Line, num_ways: int) -> Line:
    """What one of several ways does of something."""
    return Line(line.per_sample / num_ways, line.fixed)


def full_graph(
    num_vertices: int = REDDIT_VERTICES,
    num_edges: int = REDDIT_EDGES,
    *,
    num_features: int = 100,
    num_classes: int = 10,
    layer: str = "gcn",
    layers: int = 32,
    width: int = 100,
    mirrors: float | None = None,
    edge_reads: float = 1.0,
) -> FullGraphWorkload:
    """A network on one graph; by default of Reddit's size.

    Args:
        num_vertices: of the graph.
        num_edges: of the graph, directed.
        num_features: of a vertex.
        num_classes: of vertices.
        layer: one of :data:`LAYER_WORK`.
        layers: how many of them.
        width: features of a vertex inside.
        mirrors: vertices whose rows another one of eight ways reads, over all pairs of ways; by
            default as many as edges between vertices at random lead to.
        edge_reads: share of neighbours' rows that come out of memory, and not out of a cache.

    Raises:
        ValueError: an unknown layer, or a number makes no sense.
    """
    check_counts(num_vertices=num_vertices, num_edges=num_edges, num_features=num_features)
    check_counts(num_classes=num_classes, layers=layers, width=width)
    if layer not in LAYER_WORK:
        raise ValueError(f"unknown layer {layer!r}; expected one of {', '.join(LAYER_WORK)}")
    degree = num_edges / num_vertices
    most = (MIRROR_WAYS - 1) * num_vertices
    if mirrors is None:
        unread = float((1 - 1 / MIRROR_WAYS) ** degree)  # by one way, where edges lead anywhere
        mirrors = most * (1 - unread)
    if not (is_number(mirrors) and 0 <= mirrors <= most):
        raise ValueError(
            f"mirrors: of eight ways each vertex is read by all others at most, which is {most} in "
            f"all; got {mirrors}"
        )
    builder = ModelBuilder("float32", num_vertices)
    x = builder.argument("x", builder.result(num_features), stays=True)
    edges = builder.argument("edge_index", TensorSpec((2, num_edges), "int64"), stays=True)
    what = LAYER_WORK[layer]
    work = what.per_vertex(width, degree * (edge_reads * FLOAT_BYTES * width + INDEX_BYTES))
    value = first = builder.linear("stem", x, num_features, width)
    for index in range(layers):
        others = [first] if what.reads_first and value != first else []
        weight_bytes = FLOAT_BYTES * what.products * width**2
        sources = [value, *others, edges]
        value = builder.operator(
            f"convs.{index}", sources, builder.result(width), work, weight_bytes
        )
    output = builder.linear("head", value, width, num_classes)
    name, graph = f"{layer}-{layers}x{width}", builder.graph([output])
    return FullGraphWorkload(name, graph, builder.works, num_vertices, SOURCE, mirrors)
