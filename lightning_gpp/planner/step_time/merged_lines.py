"""The orders of devices that hold several stages, as :mod:`lightning_gpp.schedule.merge` has them.

From the numbers of a step's work, without making its program.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from lightning_gpp.graph import FEED, StageEdge
from lightning_gpp.planner.step_time.numbering import Numbering
from lightning_gpp.schedule.merge import StageQueue, merge_queues, num_ahead, turn
from lightning_gpp.schedule.path_lengths import PathLengths, path_lengths


def merged_lines(work: Numbering, num_devices: int) -> list[list[int]]:
    """The orders of devices with several stages, or with the feed, as programs merge them."""
    graph, queues = work.graph, []
    for stage, share in enumerate(work.shares):
        start, steps = 0, work.steps[stage]
        for replica, (device, units) in enumerate(zip(graph.devices[stage], share.units)):
            first = work.first[stage] + replica * 2 * share.num_microbatches
            taken = share.num_microbatches, units, share.num_units
            queues.append(StageQueue(device, steps, first, *taken, start))
            start += units
    pace, count = graph.multiples[FEED], work.num_feed_backwards
    first = work.first[-1] - count  # its forwards have no number
    back = tuple(range(-1, -count - 1, -1))
    feed = StageQueue(graph.devices[FEED][0], back, first, count, pace, pace)
    return merge_queues(
        [*queues, feed],
        _needs(work),
        replica_paths(work) if work.has_halves else None,
        num_devices=num_devices,
        num_works=work.first[-1] + count,
    )


def endless_lines(work: Numbering, num_devices: int) -> list[list[int]]:
    """The orders of devices where the pipeline does not drain and stages have no replicas."""
    turns: list[list[tuple[tuple[int, ...], int]]] = [[] for _ in range(num_devices)]
    ahead = [num_ahead([step >= 0 for step in work.steps[s]]) for s in range(len(work.shares))]
    for stage, share in enumerate(work.shares):
        first, device = work.first[stage], work.graph.devices[stage][0]
        for step in work.steps[stage]:
            number = first + (step if step >= 0 else share.num_microbatches + ~step)
            its_turn = turn(stage, max(step, ~step), ahead[stage], is_forward=step >= 0)
            turns[device].append((its_turn, number))
    fed = [ahead[edge.target] for edge in work.graph.stages.edges if edge.source == FEED]
    for microbatch in range(work.num_feed_forwards):
        its_turn = turn(FEED, microbatch, max(fed, default=0), is_forward=True)
        turns[work.graph.devices[FEED][0]].append((its_turn, work.first_feed + microbatch))
    return [[number for _, number in sorted(line)] for line in turns]


def _needs(work: Numbering) -> Iterator[tuple[int, int]]:
    """Pairs of work of which the first needs the second; no messages of the feed."""
    counts = [share.num_microbatches for share in work.shares]
    for edge in work.graph.stages.edges:
        there, back = work.edge_messages(edge)
        target = work.first[edge.target]
        if edge.source != FEED:
            source = work.first[edge.source]
            for sender, receiver, _ in there.each:
                yield target + receiver, source + sender
            source += counts[edge.source]
        else:
            source = work.first[-1]
        if edge.has_backward:
            target += counts[edge.target]
            for sender, receiver, _ in back.each:
                yield source + receiver, target + sender


def replica_paths(work: Numbering) -> PathLengths:
    """The longest paths through the replicas of all stages."""
    first = list(accumulate((share.num_replicas for share in work.shares), initial=0))
    edges = [
        StageEdge(first[edge.source] + i, first[edge.target] + j, (), edge.has_backward)
        for edge in work.graph.stages.edges
        if edge.source != FEED
        for i, j in {kind.pair for kind in work.edge_messages(edge)[0].kinds}
    ]
    return path_lengths([units for share in work.shares for units in share.units], edges)
