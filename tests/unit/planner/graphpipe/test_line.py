"""Divisions of a model in a line that begin only where one value crosses."""

from __future__ import annotations

from itertools import pairwise

from helpers.graphs import literal_graph

from lightning_gpp.cluster import Link, uniform_cluster
from lightning_gpp.cost import Costs, OpProfile, Profile
from lightning_gpp.planner.graphpipe.draft import UnitTables
from lightning_gpp.planner.graphpipe.line import UnitLine, narrow_starts
from lightning_gpp.planner.make_plan import plan_request

BLOCKS, LENGTH = 4, 3
"""Blocks of two branches of so many layers and their sum."""


def blocks():
    operators, source = {}, "x"
    for block in range(BLOCKS):
        for branch in "ab":
            for i in range(LENGTH):
                before = f"{block}{branch}.{i - 1}" if i else source
                operators[f"{block}{branch}.{i}"] = before
        source = f"sum{block}()"
        operators[source] = f"{block}a.{LENGTH - 1} {block}b.{LENGTH - 1}"
        source = f"sum{block}"
    return literal_graph(operators)


def test_narrow_divisions_keep_branches_together_and_halve_the_blocks():
    graph = blocks()
    costs = Costs(
        tuple(
            Profile({o.name: OpProfile(1.0 * size, 0.0, 0) for o in graph}, size)
            for size in (1, 2, 4)
        )
    )
    cluster = uniform_cluster(2, Link(bandwidth_bytes_per_s=1e15))
    request = plan_request(graph, cluster, minibatch_size=4, costs=costs)
    tables = UnitTables(request)
    kinds = [device.kind for device in cluster.devices]

    line = UnitLine(
        tables, 1, kinds, take_turns=False, hides_sums=True, starts=narrow_starts(tables)
    )
    divisions = [[*cut.stages()] for cut in line.divisions()]
    names = [name for unit in tables.order for name in tables.units.operators[unit]]
    place = {name: at for at, name in enumerate(names)}
    for stages in divisions:
        for before, after in pairwise(stages):
            assert before.stop == after.start
            crossing = {
                source
                for name in names
                for source in graph.predecessors[name]
                if place[source] < after.start <= place[name]
            }
            assert len(crossing) == 1
    halves = min(divisions, key=lambda some: max(one.seconds for one in some))
    assert [(one.start, one.stop) for one in halves] == [(0, 14), (14, 28)]
