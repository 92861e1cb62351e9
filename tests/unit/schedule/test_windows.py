"""Windows of training without end: together they are the program of all mini-batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.stage_dags import stage_graphs
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpp.graph import FEED, StageEdge, StageGraph
from lightning_gpp.schedule import (
    ONE_F_ONE_B_ASYNC,
    Action,
    Kind,
    Program,
    Windows,
    build_program,
    most_ahead,
)
from lightning_gpp.schedule.windows import version_differences

CHAIN = StageGraph(
    3,
    (
        StageEdge(FEED, 0, ("x",), has_backward=False),
        StageEdge(0, 1, ("a",)),
        StageEdge(1, 2, ("b",)),
    ),
)


def program(stages: StageGraph, count: int, devices: range | list[int] | None = None) -> Program:
    return build_program(
        stages,
        devices=devices or range(stages.num_stages),
        num_microbatches=count,
        schedule=ONE_F_ONE_B_ASYNC,
    )


def windows(stages: StageGraph, devices: list[int] | None = None) -> Windows:
    return Windows(lambda count: program(stages, count, devices), most_ahead(stages))


def numbered(action: Action, shift: int) -> Action:
    return replace(action, microbatch=action.microbatch + shift)


def row(actions: list[Action]) -> str:
    return " ".join(str(action) for action in actions if action.kind.is_compute)


def test_a_chain_of_three():
    """
    stage 0: F0 F1 F2 B0 | F3 B1 | F4 B2 | B3 | B4
    stage 2: F0 B0 | F1 B1 | F2 B2 | F3 B3 | F4 B4     fed as far ahead as stage 0 is
    """
    found, rows = windows(CHAIN), []
    assert most_ahead(CHAIN) == 2
    for device in (0, 2):
        rows.append(
            [
                row([numbered(a, t - w.number) for a in w.actions(device)])
                for t in range(5)
                for w in [found.window(t, 4 - t)]
            ]
        )
    assert rows[0] == ["0F0 0F1 0F2 0B0", "0F3 0B1", "0F4 0B2", "0B3", "0B4"]
    assert rows[1] == [
        "-1F0 -1F1 -1F2 2F0 2B0",
        "-1F3 2F1 2B1",
        "-1F4 2F2 2B2",
        "2F3 2B3",
        "2F4 2B4",
    ]


@given(stage_graphs(), st.integers(1, 20), st.data())
def test_windows_are_the_program(stages, count, data):
    """Also where stages share devices."""
    edges = (replace(e, has_backward=e.source != FEED) for e in stages.edges)
    stages = replace(stages, edges=tuple(edges))
    homes = [data.draw(st.integers(0, stage)) for stage in range(stages.num_stages)]
    devices = [sorted(set(homes)).index(home) for home in homes]
    whole, found = program(stages, count, devices), windows(stages, devices)
    for device in range(len(whole.actions)):
        expected = [a for a in whole.device_actions(device) if a.kind is not Kind.STEP]
        actions = [
            numbered(action, t - window.number)
            for t in range(count)
            for window in [found.window(t, count - 1 - t)]
            for action in window.actions(device)
        ]
        assert actions == expected


@given(stage_graphs(), st.integers(0, 12))
def test_differences_are_the_depth_once_the_pipeline_is_full(stages, since):
    edges = (replace(e, has_backward=e.source != FEED) for e in stages.edges)
    stages = replace(stages, edges=tuple(edges))
    found = version_differences(windows(stages).window(since, most_ahead(stages)))
    assert found == {stage: min(since, depth - 1) for stage, depth in stages.depths.items()}


def test_replicas_are_refused():
    with pytest.raises(ValueError, match=r"'1f1b-async' needs stages of one micro-batch size"):
        build_program(
            CHAIN,
            devices=[(0, 1), 2, 3],
            num_microbatches=4,
            schedule=ONE_F_ONE_B_ASYNC,
        )


@pytest.mark.parametrize("remaining", [0, 1, 2])
def test_the_pipeline_drains_as_far_as_batches_are_left(remaining):
    found = windows(CHAIN).window(7, remaining)
    forwards = [a.microbatch for a in found.actions(0) if a.kind is Kind.FORWARD]
    assert forwards == ([found.number + 2] if remaining == 2 else [])
