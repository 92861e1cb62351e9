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

from lightning_gpp.checks import check_counts
from lightning_gpp.cost import Line, OpWork
from lightning_gpp.graph import GraphInput, ModelGraph, OpNode, Parameter, TensorSpec, Value
from lightning_gpp.graph.graph_parallel import VertexShares, WaysGraph, in_ways
from lightning_gpp.workloads.layers import FLOAT_BYTES, INDEX_BYTES, LINEAR_KERNELS
from lightning_gpp.workloads.workload import Workload

REDDIT_VERTICES, REDDIT_EDGES = 232_965, 114_848_857

SOURCE = "GNNPipe (arXiv 2308.10087)"


@dataclass(frozen=True, slots=True)
class LayerWork:
    """What a layer does besides reading the rows of neighbours, in kernels that go over all rows.

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

HISTORY_ROWS = 3
"""Rows per vertex that a layer's :class:`lightning_gpp.gnn.history.History` takes."""


@dataclass(frozen=True)
class FullGraphWorkload(Workload):
    """A network on one graph.

    Attributes:
        mirrors: at a number of ways, vertices whose rows another way reads, over all pairs.
    """

    mirrors: tuple[int, float] = (2, 0.0)

    def minibatch_size(self, num_devices: int) -> int:
        """All vertices, whatever the number of devices."""
        return self.samples_per_device

    def mirrors_of(self, num_ways: int) -> float:
        """Vertices whose rows another way reads, over all pairs of ways.

        From those that are known at another number of ways, as if neighbours were spread evenly: a
        way of twice as many vertices is read by whom either half is read.
        """
        known_ways, known = self.mirrors
        if num_ways == 1 or known_ways == 1:
            return 0.0
        num_vertices = self.samples_per_device
        unread = 1 - known / (known_ways - 1) / num_vertices
        return float((num_ways - 1) * num_vertices * (1 - unread ** (known_ways / num_ways)))

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
            work = works[operator]
            if num_chunks > 1 and operator.startswith("convs_"):
                (value,) = self.graph.operator[operator].outputs
                row_bytes = value.size_bytes / self.samples_per_device
                kept = work.activation_bytes
                kept = Line(kept.per_sample + HISTORY_ROWS * row_bytes, kept.fixed)
                work = replace(work, activation_bytes=kept)
            found[name] = _part(work, num_ways)
        return model, found


def _part(work: OpWork, num_ways: int) -> OpWork:
    """The work of one of several ways."""
    flops, moved_bytes, activation_bytes = (
        Line(line.per_sample / num_ways, line.fixed)
        for line in (work.flops, work.moved_bytes, work.activation_bytes)
    )
    return OpWork(flops, moved_bytes, activation_bytes, work.num_kernels, work.dtype)


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
    mirror_ways: int = 8,
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
        mirrors: vertices whose rows another way reads, over all pairs of ``mirror_ways`` ways; by
            default as many as edges between vertices at random lead to.
        mirror_ways: see ``mirrors``.
        edge_reads: share of neighbours' rows that come out of memory, and not out of a cache.

    Raises:
        ValueError: an unknown layer, or a number makes no sense.
    """
    check_counts(num_vertices=num_vertices, num_edges=num_edges, num_features=num_features)
    check_counts(num_classes=num_classes, layers=layers, width=width, mirror_ways=mirror_ways)
    if layer not in LAYER_WORK:
        raise ValueError(f"unknown layer {layer!r}; expected one of {', '.join(LAYER_WORK)}")
    if mirrors is None:
        chance = 1 - (1 - 1 / mirror_ways) ** (num_edges / num_vertices)
        mirrors = (mirror_ways - 1) * num_vertices * chance
    if not 0 <= mirrors <= (mirror_ways - 1) * num_vertices:
        raise ValueError(
            f"each of {num_vertices} vertices is read by at most {mirror_ways - 1} other ways, got "
            f"mirrors={mirrors:g}"
        )
    builder = _Network(num_vertices, num_edges / num_vertices, edge_reads)
    value = first = builder.linear("stem", "x", num_features, width)
    for index in range(layers):
        value = builder.layer(f"convs.{index}", value, first, width, LAYER_WORK[layer])
    value = builder.linear("head", value, width, num_classes)
    inputs = (
        GraphInput(Value("x", (builder.rows(num_features),)), stays=True),
        GraphInput(Value("edge_index", (TensorSpec((2, num_edges), "int64"),)), stays=True),
    )
    graph = ModelGraph(inputs, tuple(builder.operators), (value,), tuple(builder.parameters))
    name = f"{layer}-{layers}x{width}"
    return FullGraphWorkload(
        name, graph, builder.works, num_vertices, SOURCE, (mirror_ways, mirrors)
    )


class _Network:
    """Collects the operators of a network."""

    def __init__(self, num_vertices: int, degree: float, edge_reads: float) -> None:
        self._num_vertices, self._degree, self._edge_reads = num_vertices, degree, edge_reads
        self.operators: list[OpNode] = []
        self.parameters: list[Parameter] = []
        self.works: dict[str, OpWork] = {}

    def rows(self, width: int) -> TensorSpec:
        """A row per vertex."""
        return TensorSpec((self._num_vertices, width), "float32", 0)

    def linear(self, name: str, source: str, in_features: int, out_features: int) -> str:
        """A matrix, a bias and an activation function."""
        work = OpWork(
            flops=Line(2.0 * in_features * out_features),
            moved_bytes=Line(FLOAT_BYTES * (in_features + 3.0 * out_features)),
            activation_bytes=Line(FLOAT_BYTES * 2.0 * out_features),
            num_kernels=LINEAR_KERNELS,
        )
        num_weights = (in_features + 1) * out_features
        return self._add(name, (source,), out_features, work, num_weights)

    def layer(self, name: str, source: str, first: str, width: int, what: LayerWork) -> str:
        """A message-passing layer."""
        along_edges = self._degree * (self._edge_reads * FLOAT_BYTES * width + INDEX_BYTES)
        work = OpWork(
            flops=Line(2.0 * what.products * width**2),
            moved_bytes=Line(FLOAT_BYTES * what.rows_moved * width + along_edges),
            activation_bytes=Line(float(FLOAT_BYTES * what.rows_kept * width)),
            num_kernels=what.kernels,
        )
        others = (first,) if what.reads_first and first != source else ()
        num_weights = what.products * width**2
        return self._add(name, (source, *others, "edge_index"), width, work, num_weights)

    def _add(
        self, name: str, inputs: tuple[str, ...], width: int, work: OpWork, num_weights: int
    ) -> str:
        identifier = name.replace(".", "_")
        value = Value(f"{identifier}_out", (self.rows(width),))
        weight = Parameter(f"{name}.weight", FLOAT_BYTES * num_weights)
        self.operators.append(OpNode(identifier, name, name, inputs, (value,), (weight.name,)))
        self.parameters.append(weight)
        self.works[identifier] = work
        return value.name
