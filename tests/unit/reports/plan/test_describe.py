from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.graphs import literal_graph, profile_of

from lightning_gpp.cluster import Link, uniform_cluster
from lightning_gpp.common.units_of_measure import bytes_text, seconds_text
from lightning_gpp.graph import FEED, StageEdge, StageGraph
from lightning_gpp.planner import (
    Plan,
    PlanRequest,
    Stage,
    evaluate_plan,
    plan_request,
    resolve_plan,
)
from lightning_gpp.planner.step_time.evaluate import device_times
from lightning_gpp.reports.plan.describe import (
    describe_bounds,
    describe_graph,
    describe_plan,
    describe_source,
    shares_text,
)
from lightning_gpp.reports.plan.explain import (
    Alternative,
    describe_alternatives,
    describe_devices,
    why_it_lost,
)
from lightning_gpp.reports.plan.picture import plan_figure

GRAPH = literal_graph(
    {
        "stem": "x",
        "enc.a": "stem",
        "enc.b": "stem",
        "cat()": "enc.a enc.b",
        "head": "cat()",
    },
    parameters={"head": ["stem.weight", "head.bias"]},
)
PLAN = resolve_plan([["stem"], ["enc.a"], ["enc.b"], ["head", "cat"]], GRAPH)
FREE = Link(1e30)


def question(**options) -> PlanRequest:
    """16 samples in 4 micro-batches of 4, on devices of 12 kB with free links."""
    cluster = uniform_cluster(4, FREE)
    devices = tuple(replace(device, memory_bytes=12_000) for device in cluster.devices)
    return plan_request(
        GRAPH,
        replace(cluster, devices=devices),
        costs=profile_of(GRAPH),
        minibatch_size=16,
        num_microbatches=4,
        **options,
    )


REQUEST = question()
FOUND = evaluate_plan(PLAN, REQUEST)


def lines_of(text: str) -> str:
    """An indented literal without its margin."""
    lines = text.strip("\n").rstrip().split("\n")
    margin = min(len(line) - len(line.lstrip()) for line in lines if line)
    return "\n".join(line[margin:] for line in lines)


def test_every_stage_that_sets_the_pace_is_named():
    rows = [["stem", "enc.a"], ["enc.b"], ["cat", "head"]]
    even = evaluate_plan(resolve_plan(rows, GRAPH), REQUEST)
    assert [found.stage.id for found in even.bottlenecks] == [0, 2]
    assert "; stage 2 likewise." in " ".join(describe_plan(even, REQUEST).split())
    stages = tuple(
        replace(stage, devices=(min(stage.devices[0], 1),))
        for stage in (Stage(0, ("stem",), (0,)), *PLAN.stages[1:])
    )
    shared = evaluate_plan(replace(PLAN, stages=stages), REQUEST)
    assert [found.stage.id for found in shared.bottlenecks] == [1, 2, 3]
    text = " ".join(describe_plan(shared, REQUEST).split())
    assert "Pace: stage 3 (device 1) sets it" in text
    assert "; stages 1-3 together 3.00 ms per sample" in text
    assert [found.stage.id for found in FOUND.bottlenecks] == [3]


def test_text_and_picture_say_alike_what_sets_the_pace() -> None:
    """Of the stages of the busiest device the first is held up by messages, the slowest is not."""
    stages = tuple(replace(stage, devices=(0,)) for stage in PLAN.stages)
    found = evaluate_plan(replace(PLAN, stages=stages), REQUEST)
    first = replace(found.stages[0], communication_s=4e-3)
    found = replace(found, stages=(first, *found.stages[1:]))
    assert found.bottlenecks[0].bound == "communication" and found.pacemaker.stage.id == 3
    subtitle = plan_figure(found, REQUEST).texts[1].get_text()
    assert subtitle.endswith("; pace: stages 0-3 (compute)")
    assert "Pace: stage 3 (device 0) sets it by compute" in describe_bounds(found)


def test_the_whole_text():
    """Every operator takes 3 ms and 100 B, and has 1 kB, of which Adam makes 4 kB."""
    assert describe_plan(FOUND, REQUEST, max_width=90) == lines_of("""
        Plan 'manual': 4 stages on 4 devices, depth 3, 4 micro-batches of 4, schedule 1f1b
        Predicted step: 30.0 ms for 16 samples, 533.3 samples/s
        Memory by schedule: gpipe 11.9 kB, 1f1b 9.7 kB on the fullest device

                                  micro-      in                         per
        stage  device  operators   batch  flight  compute  messages   sample   load  memory
        ───────────────────────────────────────────────────────────────────────────────────
            0       0  stem            4       3  3.00 ms       0 s   750 us   50 %  4.3 kB
            1       1  enc.a           4       2  3.00 ms       0 s   750 us   50 %  4.2 kB
            2       2  enc.b           4       2  3.00 ms       0 s   750 us   50 %  4.2 kB
            3       3  head, cat       4       1  6.00 ms       0 s  1.50 ms  100 %  8.2 kB

        Pace: stage 3 (device 3) sets it by compute, 1.50 ms per sample: compute 6.00 ms per
          micro-batch of 4, messages 0 s meanwhile.
        Step: 24.0 ms at that pace, and 6.00 ms (20 %) to fill and to empty the pipeline.
        Memory: device 3 is the fullest, 9.7 kB (1.5 kB of it batch, outputs and their gradients)
          of 12.0 kB (81 %).

        Compute: forward and backward of one micro-batch (measured on cpu).
        Messages: what a replica sends meanwhile.
        Per sample: the longer of both, and sums of gradients. Load: of the slowest stage's.
        Memory: parameters, gradients, optimizer state (Adam: 2 values per parameter) and
          activations in flight, on each device. r: activations are computed again.
        Below, stages of one depth work side by side; bytes are of a message, of one micro-batch.

        depth  stage  inputs  sends to
        ──────────────────────────────────────────
            3      0   256 B  1 (256 B), 2 (256 B)
            2      1          3 (256 B)
            2      2          3 (256 B)
            1      3
    """)


def test_devices_and_what_they_wait_for():
    """Stage 3 works from 2 ms to 26 ms; the first gradient is back at stage 0 after 8 ms."""
    rows = [
        row.split("  ") for row in describe_devices(FOUND, REQUEST).split("\n\n")[0].split("\n")[3:]
    ]
    assert [[cell.strip() for cell in row if cell] for row in rows] == [
        [
            "0",
            "0",
            "12.0 ms 40 %",
            "18.0 ms 60 %",
            "0 %",
            "0 %",
            "60 %",
            "0 %",
            "4.0 kB",
            "300 B",
            "36 %",
        ],
        [
            "1",
            "1",
            "12.0 ms 40 %",
            "18.0 ms 60 %",
            "3 %",
            "0 %",
            "50 %",
            "7 %",
            "4.0 kB",
            "200 B",
            "35 %",
        ],
        [
            "2",
            "2",
            "12.0 ms 40 %",
            "18.0 ms 60 %",
            "3 %",
            "0 %",
            "50 %",
            "7 %",
            "4.0 kB",
            "200 B",
            "35 %",
        ],
        [
            "3",
            "3",
            "24.0 ms 80 %",
            "6.00 ms 20 %",
            "7 %",
            "0 %",
            "0 %",
            "13 %",
            "8.0 kB",
            "1.7 kB",
            "81 %",
        ],
    ]


def test_narrow_terminals_have_two_tables_of_devices():
    wide, narrow = (describe_devices(FOUND, REQUEST, max_width=width) for width in (100, 80))
    assert max(map(len, narrow.split("\n"))) <= 80
    (table, _), (time, memory, _) = wide.split("\n\n"), narrow.split("\n\n")
    row = table.split("\n")[-1].split()
    assert time.split("\n")[-1].split() == row[:-6]
    assert memory.split("\n")[-1].split() == row[:2] + row[-6:]


def test_the_time_of_a_device_is_the_step():
    for time in device_times(FOUND, REQUEST):
        assert time.compute_s + time.wait_s + time.reduce_s == pytest.approx(FOUND.step_s)
    assert [time.fill_s for time in device_times(FOUND, REQUEST)] == pytest.approx(
        [0.0, 1e-3, 1e-3, 2e-3]
    )


REPLICAS = Plan(
    (
        Stage(0, ("stem", "enc_a", "enc_b"), (0, 1), 2, recompute=True),
        Stage(1, ("cat", "head"), (2, 3), 2),
    ),
    num_microbatches=4,
)


def test_replicas_share_a_row_and_the_loss_has_a_box():
    found = evaluate_plan(REPLICAS, REQUEST)
    text = describe_plan(found, REQUEST)
    assert "stage 0 (devices 0-1) sets it" in text
    assert "8 r" in text
    assert "but has 12.0 kB (107 %): the plan does not fit" in text
    assert "loss (512 B)" in text
    assert "depth 3 with the loss, 2 micro-batches of 8, schedule" in text
    rows = describe_devices(found, REQUEST).split("\n\n")[0].split("\n")[3:]
    # the user's step takes memory on device 2
    assert [row.split()[:2] for row in rows] == [["0-1", "0"], ["2", "1"], ["3", "1"]]


def test_columns_of_devices_are_explained():
    alone = describe_devices(FOUND, REQUEST, max_width=80)
    assert "Waits: for its first input (start)" in alone and "Sums:" not in alone
    slow = replace(REQUEST, cluster=uniform_cluster(4, Link(1000.0)))
    replicas = describe_devices(evaluate_plan(REPLICAS, slow), slow, max_width=80)
    assert "Sums: adding up the gradients of replicas behind its last backward." in replicas


def test_microbatches_of_different_sizes():
    multiples = replace(PLAN.stages[1], microbatch_multiple=2)
    plan = replace(PLAN, stages=(PLAN.stages[0], multiples, *PLAN.stages[2:]), num_microbatches=4)
    text = describe_plan(evaluate_plan(plan, REQUEST), REQUEST)
    assert "depth 3, micro-batches of 4 to 8, schedule 1f1b" in text


def test_a_step_that_a_link_bounds_counts_what_fills_the_pipeline():
    """Messages wait for each other there and back; beside them, compute is nothing."""
    slow = replace(REQUEST, cluster=uniform_cluster(4, Link(1000.0)))
    two = resolve_plan([["stem", "enc", "cat"], ["head"]], GRAPH)
    text = describe_plan(evaluate_plan(two, slow), slow)
    step = "Step: 1.02 s at that pace, and 2.53 s (71 %) to fill and to empty the pipeline."
    assert step in " ".join(text.split())


class TestAlternatives:
    def test_reasons(self):
        free = replace(REQUEST, cluster=uniform_cluster(4, FREE))
        two = resolve_plan([["stem", "enc.a", "enc.b"], ["head", "cat"]], GRAPH)
        chain = replace(PLAN, is_chain=True)
        others = {
            "gpipe": evaluate_plan(PLAN, question(schedule="gpipe")),
            "chain": evaluate_plan(chain, REQUEST),
            "too large": evaluate_plan(REPLICAS, REQUEST),
            "slow": evaluate_plan(two, free),
            "same": FOUND,
        }
        found = [Alternative(name, evaluation) for name, evaluation in others.items()]
        found.append(Alternative("piper", failure="more than 10 ideals"))
        assert {other.name: why_it_lost(FOUND, other) for other in found} == {
            "gpipe": "same step, more memory",
            "chain": "same pace, but 9.00 ms to fill and empty, not 6.00 ms (deeper)",
            "too large": "device 0 needs 12.8 kB of 12.0 kB",
            "slow": "stage 0 takes 2.25 ms per sample (compute), not 1.50 ms",
            "same": "same step and memory",
            "piper": "more than 10 ideals",
        }
        assert (
            why_it_lost(others["chain"], found[-2]) == "it is faster: the planner did not find it"
        )

    def test_a_step_shorter_than_its_pace(self):
        """A device's messages lie beside the work of its other stages."""
        steady_s = FOUND.minibatch_size * FOUND.seconds_per_sample
        text = describe_bounds(replace(FOUND, step_s=0.9 * steady_s))
        assert f"less than {seconds_text(steady_s)} at that pace" in text
        assert "to fill and to empty" not in text

    def test_hardly_faster_with_more_stages(self):
        slower = replace(FOUND, step_s=FOUND.step_s * 1.004, stages=FOUND.stages[1:])
        text = why_it_lost(slower, Alternative("more", FOUND))
        assert text == "faster by 0.4 %, but more stages"

    def test_as_long_as_the_best_but_for_rounding(self):
        same = Alternative("same", replace(FOUND, step_s=FOUND.step_s * (1 - 1e-12)))
        assert "  +0 %  " in describe_alternatives(FOUND, [same])

    def test_table(self):
        two = Alternative("two", evaluate_plan(REPLICAS, REQUEST))
        none = Alternative("piper", failure="more than 10 ideals")
        assert describe_alternatives(FOUND, [two, none]) == lines_of("""
                                  micro-
            plan   stages  depth   batch     step         memory  why not
            ───────────────────────────────────────────────────────────────────────────────────────
            two         2      3       8  30.0 ms  +0 %  12.8 kB  device 0 needs 12.8 kB of 12.0 kB
            piper                                                 more than 10 ideals
        """)


def test_estimates_say_so():
    estimated = plan_request(GRAPH, 4, minibatch_size=4, num_microbatches=4)
    text = describe_plan(evaluate_plan(PLAN, estimated), estimated)
    assert "estimated, not measured" in text
    assert "its limit is not known" in " ".join(text.split())
    published = replace(profile_of(GRAPH), device="any")
    request = plan_request(GRAPH, 4, costs=published, minibatch_size=4, num_microbatches=4)
    assert describe_source(request) == "from the published profile"


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_960, "1.0 MB"), (3e15, "3000 TB")],
)
def test_bytes(size_bytes, text):
    assert bytes_text(size_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (2e-6, "2.00 us"),
        (0.0123, "12.3 ms"),
        (0.5, "500 ms"),
        (0.99951, "1.00 s"),
        (61.0, "61.0 s"),
        (4321.0, "4321 s"),
    ],
)
def test_seconds(seconds, text):
    assert seconds_text(seconds) == text


def test_unequal_shares_are_named():
    stages = (REPLICAS.stages[0], replace(REPLICAS.stages[1], microbatch_multiple=4, shares=(3, 1)))
    plan = replace(REPLICAS, stages=stages)
    found = evaluate_plan(plan, REQUEST)
    assert shares_text(found.stages[1]) == "12 + 4"
    assert " 12 + 4 " in describe_plan(found, REQUEST)
    busy = {one.device: one.busy_s for one in found.devices}
    assert busy[2] == pytest.approx(3 * busy[3])


def test_edges_without_gradient_say_so():
    edges = (
        StageEdge(FEED, 0, ("x",), 4096, has_backward=False),
        StageEdge(0, 1, ("v",), 8, False),
    )
    assert describe_graph(StageGraph(2, edges), 2) == lines_of("""
        depth  stage  inputs  sends to
        ──────────────────────────────────────────
            2      0  4.1 kB  1 (8 B, no gradient)
            1      1
    """)
