"""The pieces of the search for plans whose stages share devices.

x ─┬─> a ─> b ─┬─> j
   └─> c ─> d ─┘
"""

from __future__ import annotations

import math

import pytest
from helpers.graphs import literal_graph, profile_of

from lightning_gpp.cluster import Cluster, Device, Link
from lightning_gpp.cost import Costs
from lightning_gpp.planner import evaluate_plan, plan_request
from lightning_gpp.planner.graphpipe.deals import (
    balanced,
    branches,
    deals,
    equal_groups,
    followed,
    packed_branches,
    redealt,
    runs,
)
from lightning_gpp.planner.graphpipe.draft import Draft, DraftStage, UnitTables, arranged, plan_of
from lightning_gpp.planner.graphpipe.homes import Homes, OwnHomes
from lightning_gpp.planner.graphpipe.judge import DraftJudge
from lightning_gpp.planner.graphpipe.moves import (
    at_branches,
    by_needs,
    by_work,
    merged,
    parted,
    resized,
    shifted,
)
from lightning_gpp.planner.graphpipe.planner import search_plans

GRAPH = literal_graph({"a": "x", "b": "a", "c": "x", "d": "c", "j": "b d"})
A, B, C, D, J = (1 << place for place in range(5))  # in depth-first order
FREE = Link(bandwidth_bytes_per_s=1e15)


def tables(num_devices: int = 2, **options: int) -> UnitTables:
    """Of the fork and join above; every operator takes as long."""
    devices = tuple(Device(str(i)) for i in range(num_devices))
    costs = Costs((profile_of(GRAPH),))
    request = plan_request(GRAPH, Cluster(devices, FREE), minibatch_size=8, costs=costs, **options)
    return UnitTables(request)


def test_sets_of_units():
    found = tables()
    assert found.operators(B | J) == ("b", "j")
    assert found.sources(B | J) == A | D
    assert found.makers == J
    assert found.carried(A | B, J, takes_outputs=True).values == ("b",)
    assert found.carried(0, A | C, takes_outputs=False).values == ("x",)
    assert not found.carried(A, D, takes_outputs=False).values


def test_stages_follow_from_groups():
    """The join is on the device of a branch, but not in its stage: it waits for the other."""
    assert equal_groups(tables(), 2) == [0, 0, 1, 1, 1]
    assert followed([0, 0, 1, 1, 1], tables()) == [(0, A | B), (1, C | D), (1, J)]
    assert followed([0, 0, 0, 0, 0], tables()) == [(0, A | B | C | D | J)]
    assert followed([0, 1, 0, 0, 0], tables()) == [(0, A | C | D), (1, B), (0, J)]


def test_deals_are_for_all_numbers_of_replicas_and_sizes():
    found = list(deals(tables()))
    # two groups of 1 device in two ways, one of 1 and one of 2, with 1, 2, 4 and 8 samples
    assert len(found) == 4 * 4
    assert {stage.devices for draft in found for stage in draft.stages} == {(0,), (1,), (0, 1)}


def test_whole_branches_go_to_the_least_busy_group():
    """A join is a branch of its own; what is longer than a group's work is cut."""
    assert branches(tables()) == [[0, 1], [2, 3], [4]]
    assert packed_branches(tables(), 1) == [0, 0, 0, 0, 0]
    assert packed_branches(tables(), 2) == [0, 0, 1, 1, 0]
    assert packed_branches(tables(), 3) == [0, 0, 1, 1, 2]
    assert sorted(packed_branches(tables(), 5)) == [0, 1, 2, 3, 4]
    assert runs([0, 0, 1, 1, 0]) == [(0, A | B | J), (1, C | D)]


def test_cuts():
    found = tables()
    assert set(by_work(A | B | C | D, found)) == {
        (A, B | C | D),
        (A | B, C | D),
        (A | B | C, D),
    }
    assert list(at_branches(A | B | C | D | J, found)) == [(A | B, C | D | J)]
    stages = (DraftStage(C | D, (1,)), DraftStage(A | B | J, (0,)))
    assert by_needs(stages, 1, found) == [A | B, J]


def test_stages_are_put_in_order_with_an_output_last():
    found = tables()
    one, other, last = DraftStage(A | B, (0,)), DraftStage(C | D, (1,)), DraftStage(J, (0,))
    assert arranged([last, other, one], found) == (other, one, last)
    in_circle = [DraftStage(A | J, (0,)), DraftStage(B | C | D, (1,))]
    assert arranged(in_circle, found) is None


def test_moves_keep_all_units():
    found = tables()
    draft = Draft((DraftStage(C | D, (1,)), DraftStage(A | B | J, (0,))), 2)
    homes = Homes(draft, found)
    apart = Draft((draft.stages[0], DraftStage(A | B, (0,)), DraftStage(J, (0,))), 2)
    assert apart in list(parted(draft, homes))
    assert {stage.units for one in merged(apart, Homes(apart, found)) for stage in one.stages} >= {
        A | B | J
    }
    assert Draft((DraftStage(C, (1,)), DraftStage(A | B | D | J, (0,))), 2) in list(
        shifted(draft, homes)
    )
    assert draft._replace(num_microbatches=4) in list(resized(draft, homes))
    assert not list(resized(draft, Homes(draft, tables(num_microbatches=2))))
    for family in (parted, merged, shifted, resized):
        for one in family(draft, homes):
            assert sum(stage.units for stage in one.stages) == found.everything


def test_homes_are_those_in_use_halves_doubles_and_the_least_busy_blocks():
    draft = Draft((DraftStage(A | B | C | D, (0, 1), 2), DraftStage(J, (2,), 2)), 2)
    found = set(Homes(draft, tables(4)).others(draft.stages[0]))
    assert found == {(0,), (1,), (2,), (3,), (2, 3), (0, 1, 2, 3)}


def test_own_homes_are_halves_and_idle_devices():
    draft = Draft((DraftStage(A | B | C | D, (0, 1), 2), DraftStage(J, (2,), 2)), 2)
    homes = OwnHomes(draft, tables(4))
    assert set(homes.others(draft.stages[0])) == {(0,), (1,), (3,)}
    assert set(homes.others(draft.stages[1])) == {(2, 3), (3,)}
    assert set(homes.pairs(draft.stages[0])) == {((0,), (1,)), ((0, 1), (3,))}
    assert not list(homes.together(*draft.stages))
    towers = Draft((DraftStage(A | B, (0,)), DraftStage(C | D | J, (1,))), 2)
    assert list(OwnHomes(towers, tables()).together(*towers.stages)) == [(0, 1)]


def test_borders_are_balanced_between_groups():
    """Of five equal units, where the first group is twice as fast, four go to it."""
    even, double = [0, 1, 2, 3, 4, 5], [0, 2, 4, 6, 8, 10]
    assert balanced([even, double]) == [0, 4, 5]
    assert balanced([even] * 5) == [0, 1, 2, 3, 4, 5]
    assert balanced([even] * 6) is None
    assert balanced([[0, 0, 0], [0, 0, 0]]) == [0, 1, 2]


def test_devices_are_taken_from_idle_ones_or_from_other_groups():
    """Stages of two towers on one device each, of two or of four."""
    draft = Draft((DraftStage(A | B, (0,)), DraftStage(C | D | J, (1,))), 8)

    def sizes(count: int) -> set[tuple[int, ...]]:
        near = redealt(draft, OwnHomes(draft, tables(count)))
        return {tuple(stage.num_replicas for stage in one.stages) for one in near}

    assert sizes(2) == {(1, 1), (2,), (1,)}
    assert sizes(4) == {(1, 1), (2,), (1,), (2, 1), (1, 2), (1, 1, 1)}
    assert not list(redealt(draft, Homes(draft, tables(4))))


def test_a_budget_of_nothing_looks_at_nothing():
    judge = DraftJudge(tables(), "graphpipe", budget=0)
    assert judge.is_spent
    assert judge.promising(deals(judge.tables), 1.0) == []


def test_what_was_too_long_for_one_limit_is_played_for_a_larger_one():
    judge, anew = (DraftJudge(tables(), "graphpipe", budget=1000) for _ in range(2))
    draft = by_hand()
    step_s = anew.step_s(draft, math.inf)
    assert judge.step_s(draft, step_s / 2) == math.inf
    assert judge.best is None
    assert judge.step_s(draft, step_s / 3) == math.inf
    assert judge.step_s(draft, 2 * step_s) == step_s
    assert judge.best is not None and judge.best.step_s == step_s
    assert judge.step_s(draft, step_s / 2) == step_s  # is known by now


def test_what_is_known_of_a_step_is_its_lower_bound():
    """So another family of moves does not look at it again."""
    judge, anew = (DraftJudge(tables(), "graphpipe", budget=1000) for _ in range(2))
    draft = by_hand()
    ((least_s, _),) = judge.promising([draft], math.inf)
    limit_s = (least_s + anew.step_s(draft, math.inf)) / 2
    assert judge.step_s(draft, limit_s) == math.inf
    assert judge.promising([draft], limit_s) == []
    ((again_s, _),) = judge.promising([draft], math.inf)
    assert again_s == limit_s


def test_the_head_of_two_towers_is_a_stage_beside_one_of_them():
    """With whole micro-batches both towers run side by side, which exclusive devices forbid."""
    request = tables(num_microbatches=1, max_replicas=1).request
    found = evaluate_plan(search_plans(request).best, request)
    assert found.step_s == pytest.approx(
        evaluate_plan(plan_of(by_hand(), tables(), ""), request).step_s
    )
    homes = [stage.devices for stage in found.plan.stages]
    assert len(homes) == 3 and len(set(homes)) == 2


def by_hand() -> Draft:
    """A tower on each device, and the head on the second one."""
    return Draft((DraftStage(A | B, (0,)), DraftStage(C | D, (1,)), DraftStage(J, (1,))), 1)
