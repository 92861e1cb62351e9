"""The verdict on a plan: what it says follows from the numbers, in every case."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.graphs import literal_graph, profile_of

from lightning_gpp.cluster import Link, uniform_cluster
from lightning_gpp.cost import Costs, OpProfile, Profile
from lightning_gpp.planner import Plan, PlanRequest, Stage, evaluate_plan, plan_request
from lightning_gpp.reports.plan.verdict import BatchTimes, PlanVerdict, best_alone

GRAPH = literal_graph({"a": "x", "b": "x", "cat()": "a b"})
TWO = Plan((Stage(0, ("a",), (0,)), Stage(1, ("b",), (1,)), Stage(2, ("cat",), (1,))))
FREE, DEAR = Link(1e30), Link(1.0)


def question(link: Link = FREE, memory_bytes: int | None = None, **options: object) -> PlanRequest:
    """Two branches of 3 ms each (forward and backward) and a join, on two devices."""
    cluster = uniform_cluster(2, link)
    devices = tuple(replace(device, memory_bytes=memory_bytes) for device in cluster.devices)
    return plan_request(
        GRAPH,
        replace(cluster, devices=devices),
        costs=profile_of(GRAPH),
        minibatch_size=4,
        **options,  # type: ignore[arg-type]
    )


def verdict(request: PlanRequest, **options: int) -> PlanVerdict:
    plan = replace(TWO, num_microbatches=1)
    return PlanVerdict.of(evaluate_plan(plan, request), request, **options)


def test_branches_side_by_side_are_a_gain() -> None:
    found = verdict(question())
    assert found.speedup == pytest.approx(1.5)
    assert found.text(200).startswith(
        "Verdict: 2 devices are at best 1.5 times as fast as one (predicted:"
    )
    assert "larger batches" not in found.text(400)


def test_dear_messages_are_none_and_the_text_says_what_they_cost() -> None:
    found = verdict(question(DEAR))
    assert found.speedup < 0.01
    text = found.text(400)
    assert "2 devices are slower than one" in text
    assert text.endswith("larger batches or layers would help.")


def test_one_device_accumulates_gradients_where_the_mini_batch_does_not_fit() -> None:
    whole = best_alone(question())
    request = question(memory_bytes=whole.peak_memory_bytes - 1, schedule="gpipe")
    found = verdict(request)
    assert found.one_device_fits and found.one_device_pieces == 2
    assert found.one_device_bytes < whole.peak_memory_bytes
    cut = replace(request, schedule="1f1b", num_microbatches=2)
    plan = Plan((Stage(0, ("a", "b", "cat"), (0,)),), num_microbatches=2)
    assert found.one_device_s == evaluate_plan(plan, cut).step_s
    assert "in 2 micro-batches, as larger ones do not fit" in found.text(400)
    assert "in 2 micro-batches" in found.measured_text(BatchTimes(1.0, 10, 0.5), 400)


def test_nothing_is_predicted_of_processes_that_share_cores() -> None:
    shared, alone = (verdict(question(), num_cores=count) for count in (1, 2))
    assert "predicted: " in alone.text(400)
    assert shared.text(400).startswith(
        "Verdict: 2 processes share 1 core: expect this to be slower than one process; predictions"
    )
    text = shared.measured_text(BatchTimes(2.0, 10, 0.5), 400)
    assert text.startswith("Verdict: 2 processes that share 1 core are slower than one: 2.00 s")


def test_more_than_all_devices_can_gain_is_not_told() -> None:
    found = replace(verdict(question()), step_s=1e-3, one_device_s=8.2e-3, is_estimated=False)
    assert "2 devices cannot be 8.2 times as fast as one" in found.text(400)
    in_pieces = replace(found, one_device_pieces=4)  # which are slower than one
    assert "8.2 times as fast as one (" in in_pieces.text(400)
    took = BatchTimes(1e-3, 10, 0.0)
    assert found.measured_text(took) == "Verdict: 2 processes: 1.00 ms a batch (median of 10)."
    assert "about 8.2 times as fast" in in_pieces.measured_text(took, 400)


def test_of_unequal_devices_the_fastest_is_the_one() -> None:
    fast = Profile({o.name: OpProfile(1e-3, 2e-3, 100) for o in GRAPH}, 1, "cpu")
    slow = Profile({o.name: OpProfile(1e-2, 2e-2, 100) for o in GRAPH}, 1, "gpu")
    request = question()
    first, second = request.cluster.devices
    cluster = replace(request.cluster, devices=(replace(first, kind="gpu"), second))
    unequal = replace(request, cluster=cluster, costs=Costs((fast, slow)))
    alone = best_alone(unequal)
    assert [stage.devices for stage in alone.plan.stages] == [(1,)]
    assert alone.plan.stages[0].operators == tuple(operator.name for operator in GRAPH)


@pytest.mark.parametrize(
    ("took", "says"),
    [
        (
            BatchTimes(2.0, 10, 0.5),
            "are slower than one: 2.00 s a batch (median of 10), one process about 1.50 s; "
            "each needs at most 50 % of its memory.",
        ),
        (BatchTimes(1.0, 10, 0.4), "are about 1.4 times as fast as one: 1.00 s a batch (median"),
        (BatchTimes(1.0, 10, 0.0), "are about as fast as one: 1.00 s a batch (median of 10)"),
    ],
)
def test_the_verdict_by_what_was_measured(took: BatchTimes, says: str) -> None:
    found = replace(verdict(question()), one_device_s=1.0, step_s=0.5, memory_bytes=1)
    found = replace(found, one_device_bytes=2)
    text = found.measured_text(took, 400)
    assert says in text and text.startswith("Verdict: 2 processes are ")
    assert found.measured_text(BatchTimes(2.0, 10), 400) == (
        "Verdict: 2 processes: 2.00 s a batch (median of 10)."
    )
