from __future__ import annotations

import pytest
from helpers.graphs import literal_graph, profile_of

from lightning_gpp.planner import describe_plan, resolve_plan
from lightning_gpp.planner.describe import report_stage
from lightning_gpp.planner.units_of_measure import bytes_text, seconds_text

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


def test_the_table_and_the_picture():
    text = describe_plan(PLAN, GRAPH, profile_of(GRAPH), num_microbatches=4)
    lines = text.split("\n")
    assert lines[0] == "Plan 'manual': 4 stages on 4 devices, 4 micro-batches, schedule 1f1b"
    assert lines[2].split() == [
        "stage",
        "device",
        "operators",
        "parameters",
        "memory",
        "in",
        "flight",
        "time",
        "share",
    ]
    # 1 kB of parameters: 4 kB with gradients and Adam, and 3 x 100 B of activations
    assert lines[4].split() == [
        "0",
        "0",
        "stem",
        "1.0",
        "kB",
        "(1)",
        "4.3",
        "kB",
        "3",
        "3.0",
        "ms",
        "20",
        "%",
    ]
    assert lines[7].split()[2:4] == ["head,", "cat"]
    assert "measured on cpu" in text
    assert "│  stage 1 · device 1   │" in text
    assert max(map(len, lines)) <= 100


def test_estimates_say_so():
    text = describe_plan(PLAN, GRAPH, num_microbatches=4)
    assert "estimated from sizes, not measured" in text


def test_memory_counts_trained_parameters_four_times_under_adam():
    report = report_stage(PLAN.stages[3], GRAPH, profile_of(GRAPH), in_flight=5)
    assert report.num_parameters == 2
    assert report.parameter_bytes == 2000
    assert report.training_bytes == 4 * 2000
    assert report.activation_bytes == 5 * 200
    plain = report_stage(PLAN.stages[3], GRAPH, profile_of(GRAPH), in_flight=5, optimizer_values=0)
    assert plain.training_bytes == 2 * 2000
    assert plain.memory_bytes == 2 * 2000 + 5 * 200


def test_multiples_are_shown():
    plan = resolve_plan([{"modules": ["stem", "enc"], "microbatch_multiple": 2}, "head"], GRAPH)
    text = describe_plan(plan, GRAPH, profile_of(GRAPH), num_microbatches=4)
    assert "x2" in text
    assert "x1" in text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_960, "1.0 MB"), (3e15, "3000 TB")],
)
def test_bytes(size_bytes, text):
    assert bytes_text(size_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.0 us"), (2e-6, "2.0 us"), (0.0123, "12.3 ms"), (0.5, "500 ms"), (61.0, "61.0 s")],
)
def test_seconds(seconds, text):
    assert seconds_text(seconds) == text
