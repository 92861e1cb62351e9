"""How the values of a traced graph can be cut, from what they are at two numbers of samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from lightning_gpp.capture.operators.observe import Observation
from lightning_gpp.capture.operators.variation import variations
from lightning_gpp.capture.values.graph_inputs import GraphInputs
from lightning_gpp.capture.values.samples import Sample
from lightning_gpp.graph import Variation

Dims = Mapping[str, tuple[int | None, ...]]


@dataclass(frozen=True, slots=True)
class Cuts:
    """How values can be cut, all by the name of the value.

    Attributes:
        batch_dims: dimension of the samples of each tensor in a value.
        vertex_dims: dimension of the vertices of each, where the model is called with one graph.
        variations: how a value goes with the samples or vertices.
        one_graph: whether the model is called with one graph, and not with a batch of them.
    """

    batch_dims: Dims = field(default_factory=dict)
    vertex_dims: Dims = field(default_factory=dict)
    variations: Mapping[str, Variation] = field(default_factory=dict)
    one_graph: bool = False

    @classmethod
    def of(
        cls,
        seen: Mapping[fx.Node, Observation],
        sample: Sample,
        others: Mapping[fx.Node, Observation] | None,
        second: Sample | None,
    ) -> Cuts:
        """Finds them.

        Args:
            seen: what every node did with the first sample, in the order in which they run.
            sample: the first.
            others: what they did with a second one; None where there is none.
            second: the second one.
        """
        graphs = sample.graphs
        num = sample.num_samples
        other_num = second.num_samples if second else num
        pairs = {
            node.name: list(_paired(seen[node].shapes, (others or seen)[node].shapes))
            for node in seen
        }
        batch_dims = {
            name: tuple(_batch_dim(*pair, num, other_num) for pair in shapes)
            for name, shapes in pairs.items()
        }
        vertices = None
        if graphs is not None and not graphs.is_batch and second is not None:
            found = GraphInputs.find(second.tensors)
            vertices = None if found is None else (graphs.num_nodes, found.num_nodes)
        vertex_dims = {
            name: tuple(_vertex_dim(*pair, vertices) for pair in shapes)
            for name, shapes in pairs.items()
        }
        ways = variations(list(seen), seen, others, other_num / num, batch_dims, vertex_dims)
        return cls(batch_dims, vertex_dims, ways, graphs is not None and not graphs.is_batch)

    def stays(self, name: str, requires_grad: bool) -> bool:
        """Whether all calls are expected to bring the same for an input."""
        same = self.one_graph or self.variations[name] is Variation.SAME
        return same and not requires_grad


_Shape = tuple[int, ...]


def _paired(shapes: Sequence[_Shape], others: Sequence[_Shape]) -> Iterator[tuple[_Shape, _Shape]]:
    """Shapes at two numbers of samples; with themselves where there are not as many, at random."""
    return zip(shapes, others if len(others) == len(shapes) else shapes, strict=True)


def _batch_dim(shape: _Shape, other: _Shape, num: int, other_num: int) -> int | None:
    """The dimension that grew in proportion to the number of samples."""
    for dim, (size, other_size) in enumerate(zip(shape, other, strict=False)):
        if size != other_size and size * other_num == other_size * num:
            return dim
    return None


def _vertex_dim(shape: _Shape, other: _Shape, vertices: tuple[int, int] | None) -> int | None:
    """The dimension that has as many entries as the graph has vertices, both times."""
    return next(
        (dim for dim, sizes in enumerate(zip(shape, other, strict=False)) if sizes == vertices),
        None,
    )
