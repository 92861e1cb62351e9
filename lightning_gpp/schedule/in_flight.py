"""How many micro-batches a stage must hold so that the pipeline flows without gaps.

With one micro-batch size the answer is the depth of the stage: a chain needs ``num_stages -
stage``, parallel branches share depths (GraphPipe, arXiv 2406.17145, section 5.3). With
micro-batch sizes of their own, stages count in samples; here in *units* of the smallest
micro-batch. The published table for that case is lost; the rule below reproduces the paper's
figure 5 (10 units for sizes 1, 2, 4 and 12 for uniform size 4) and was found by simulation.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpp.graph import StageGraph


def in_flight_units(stages: StageGraph, multiples: Sequence[int]) -> dict[int, int]:
    """Stage -> units of the smallest micro-batch in flight at its peak.

    For stage *i* with micro-batches of ``b_i`` units, over its successors *j*: a sink holds
    ``b_i``; ``i_j + b_j`` where ``b_i <= b_j``; else ``i_j + 2 b_i - b_j`` rounded up to a
    multiple of ``b_i``.

    >>> from lightning_gpp.graph import StageEdge, StageGraph
    >>> chain = StageGraph(3, tuple(StageEdge(i, i + 1, ("x",)) for i in range(2)))
    >>> in_flight_units(chain, [1, 2, 4]), in_flight_units(chain, [4, 4, 4])
    ({0: 10, 1: 8, 2: 4}, {0: 12, 1: 8, 2: 4})
    """
    successors = [stages.successors[stage] for stage in range(stages.num_stages)]
    return dict(enumerate(units_by_successors(successors, multiples)))


def units_by_successors(successors: Sequence[Sequence[int]], multiples: Sequence[int]) -> list[int]:
    """:func:`in_flight_units` where only the successors of every stage are known.

    >>> units_by_successors([[1], [2], []], [1, 2, 4])
    [10, 8, 4]
    """
    in_flight = [0] * len(multiples)
    for stage in range(len(multiples) - 1, -1, -1):
        size = most = multiples[stage]
        for successor in successors[stage]:
            other = multiples[successor]
            need = in_flight[successor] + (other if size <= other else 2 * size - other)
            most = max(most, -(-need // size) * size)
        in_flight[stage] = most
    return in_flight


def in_flight_microbatches(
    stages: StageGraph, num_microbatches: int, multiples: Sequence[int] | None = None
) -> dict[int, int]:
    """Stage -> its own micro-batches in flight at its peak under 1F1B (or kFkB).

    Args:
        stages: the stage graph.
        num_microbatches: smallest micro-batches of a mini-batch.
        multiples: micro-batch size of every stage in units of the smallest; all 1 by default.

    >>> from lightning_gpp.graph import StageEdge, StageGraph
    >>> pairs = [(0, 1), (0, 2), (1, 3), (2, 3)]
    >>> fork_join = StageGraph(4, tuple(StageEdge(*pair, ("x",)) for pair in pairs))
    >>> in_flight_microbatches(fork_join, num_microbatches=8)
    {0: 3, 1: 2, 2: 2, 3: 1}
    """
    sizes = multiples or [1] * stages.num_stages
    units = in_flight_units(stages, sizes)
    return {
        stage: min(num_microbatches // sizes[stage], units[stage] // sizes[stage])
        for stage in range(stages.num_stages)
    }
