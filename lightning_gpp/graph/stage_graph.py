"""The graph of stages: which stage reads what from which other stage.

Stage ids are topological. Two things beside the plain operator edges are edges too:

- the *feed* (:data:`FEED`): the part of the user's step before the pipelined forward, which
  hands the forward's arguments to the stages that read them;
- outputs of the model that are not made by the last stage: the loss is computed there, so they
  travel to it.

An edge may carry no values: it only makes its target wait, as in pipelines that
know no branches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_gpp.common.checks import short_list
from lightning_gpp.graph.model_graph import ModelGraph

FEED = -1
"""Id of the pseudo-stage that makes the arguments of the pipelined forward."""


@dataclass(frozen=True, slots=True)
class StageEdge:
    """What one stage sends to another for every micro-batch.

    Attributes:
        source: producing stage, or :data:`FEED`.
        target: consuming stage.
        values: names of the values, in a fixed order: one message carries them all.
        size_bytes: bytes of one message at the captured micro-batch size.
        has_backward: whether gradients travel back along it.
    """

    source: int
    target: int
    values: tuple[str, ...]
    size_bytes: int = 0
    has_backward: bool = True

    @classmethod
    def of(cls, graph: ModelGraph, source: int, target: int, values: Iterable[str]) -> StageEdge:
        """The edge that carries some values of a model."""
        values = tuple(values)
        size_bytes = sum(graph.values[name].size_bytes for name in values)
        return cls(source, target, values, size_bytes, not graph.with_gradient.isdisjoint(values))


@dataclass(frozen=True)
class StageGraph:
    """Stages 0 … ``num_stages - 1`` and the edges between them.

    Attributes:
        num_stages: number of stages, the feed not counted.
        edges: sorted by (source, target), each pair once.
        parameter_readers: canonical names of the parameters in the order of the operators, each
            with the stages that read it, ascending.
    """

    num_stages: int
    edges: tuple[StageEdge, ...]
    parameter_readers: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def shared_parameters(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The parameters that several stages read, each with these stages."""
        return tuple(item for item in self.parameter_readers if len(item[1]) > 1)

    @cached_property
    def successors(self) -> Mapping[int, tuple[int, ...]]:
        """Stage -> stages that consume its output (the feed is not a key)."""
        return self._neighbours([(edge.source, edge.target) for edge in self.edges])

    @cached_property
    def predecessors(self) -> Mapping[int, tuple[int, ...]]:
        """Stage -> stages whose output it consumes, without the feed."""
        return self._neighbours([(edge.target, edge.source) for edge in self.edges])

    def _neighbours(self, pairs: Iterable[tuple[int, int]]) -> dict[int, tuple[int, ...]]:
        found: dict[int, list[int]] = {stage: [] for stage in range(self.num_stages)}
        for one, other in pairs:
            if FEED not in (one, other):
                found[one].append(other)
        return {stage: tuple(sorted(ids)) for stage, ids in found.items()}

    @cached_property
    def edge(self) -> Mapping[tuple[int, int], StageEdge]:
        """Edge by (source, target)."""
        return {(edge.source, edge.target): edge for edge in self.edges}

    @cached_property
    def depths(self) -> Mapping[int, int]:
        """Stage -> number of stages on the longest path to a sink, itself included."""
        return stage_depths(self.successors)


def stage_depths(successors: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """Number of stages on the longest path from each stage to a sink, itself included.

    The depth is the 1F1B number of micro-batches in flight: with balanced stages it is how many
    forwards a stage runs before its first backward can arrive. In a chain of ``D`` stages stage
    ``k`` has depth ``D - k``; parallel branches share depths, which is where graph pipelining
    saves stashed activations (GraphPipe, arXiv 2406.17145, section 2).

    Args:
        successors: stage id -> ids of the stages that consume its output. Ids are numbered in
            topological order.

    >>> stage_depths({0: (1, 2), 1: (3,), 2: (3,), 3: ()})
    {0: 3, 1: 2, 2: 2, 3: 1}
    """
    depth: dict[int, int] = {}
    for stage in sorted(successors, reverse=True):
        depth[stage] = 1 + max((depth[target] for target in successors[stage]), default=0)
    return dict(sorted(depth.items()))


def stage_graph(graph: ModelGraph, stage_operators: Sequence[Sequence[str]]) -> StageGraph:
    """The stage graph that a division of the operators into stages makes.

    Args:
        graph: the model.
        stage_operators: operator names of each stage; the position is the stage id. The outputs
            of the model travel to the last one, which may hold no operator and only take them.

    Raises:
        ValueError: an operator is in no stage or in two, is unknown, or an edge runs from a
            higher to a lower stage (the division is not convex, or its ids are not topological).
    """
    stage_of = _stage_of_operator(graph, stage_operators)
    carried = _carried(graph, stage_of, last=len(stage_operators) - 1)
    edges = tuple(StageEdge.of(graph, *pair, carried[pair]) for pair in sorted(carried))
    return StageGraph(len(stage_operators), edges, _parameter_readers(graph, stage_of))


def _carried(
    graph: ModelGraph, stage_of: Mapping[str, int], last: int
) -> dict[tuple[int, int], dict[str, None]]:
    """(source, target) -> names of the values that go from stage to stage, each once."""
    reads = [(name, producer, stage_of[reader]) for name, producer, reader in graph.reads]
    reads += [(name, graph.producer.get(name), last) for name in graph.outputs]
    found: dict[tuple[int, int], dict[str, None]] = {}
    for name, producer, target in reads:
        source = FEED if producer is None else stage_of[producer]
        if source > target:
            raise ValueError(
                f"stage {target} reads {name!r} from stage {source}: a stage may read from stages "
                "of lower number only"
            )
        if source != target:
            found.setdefault((source, target), {})[name] = None
    return found


def _stage_of_operator(
    graph: ModelGraph, stage_operators: Sequence[Sequence[str]]
) -> dict[str, int]:
    stage_of: dict[str, int] = {}
    for stage, operators in enumerate(stage_operators):
        for name in operators:
            if name not in graph.operator:
                known = short_list(
                    list(dict.fromkeys(o.scope.split(".")[0] for o in graph if o.scope))
                )
                raise ValueError(
                    f"stage {stage} of the plan names {name!r}, which is not in this model: the "
                    f"plan is of another one; modules here: {known}"
                )
            if name in stage_of:
                raise ValueError(f"operator {name!r} is in stages {stage_of[name]} and {stage}")
            stage_of[name] = stage
    if len(stage_of) < len(graph):
        missing = [operator.name for operator in graph if operator.name not in stage_of]
        raise ValueError(f"the plan does not cover the model: no stage holds {short_list(missing)}")
    return stage_of


def _parameter_readers(
    graph: ModelGraph, stage_of: Mapping[str, int]
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple(
        [
            (name, (stage_of[operators[0]],))
            if len(operators) == 1  # most of them
            else (name, tuple(sorted({stage_of[operator] for operator in operators})))
            for name, operators in graph.readers.items()
        ]
    )
