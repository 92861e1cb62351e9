"""Networks on one graph as workloads: what pipelines and ways exchange, and bad input."""

from __future__ import annotations

import pytest

from lightning_gpp.cluster import uniform_cluster
from lightning_gpp.cost import roofline_costs
from lightning_gpp.cost.estimate import NOMINAL_KIND
from lightning_gpp.planner import PlanRequest, plan_request
from lightning_gpp.planner.ways import WaysAnswer, answer_ways
from lightning_gpp.schedule import GPIPE_REVERSED
from lightning_gpp.simulate import TransferKind, simulate_plan
from lightning_gpp.workloads import FullGraphWorkload, full_graph

GIB = 2**30
REDDIT_MIRRORS = 608_200
"""Over eight ways, as GNNPipe's volumes say."""


def answered(workload: FullGraphWorkload, ways: int, num_devices: int = 8) -> WaysAnswer:
    """The balanced plan for a number of ways."""
    model, works = workload.in_ways(ways, 32)
    chunks = 1 if ways == num_devices else 4 * num_devices // ways
    num_vertices = workload.samples_per_device
    request: PlanRequest = plan_request(
        model.graph,
        uniform_cluster(num_devices, kind="estimated"),
        minibatch_size=num_vertices,
        costs=roofline_costs(works, [NOMINAL_KIND], [num_vertices / chunks]),
        num_microbatches=chunks,
        schedule=GPIPE_REVERSED.name,
        max_replicas=1,
    )
    return answer_ways(request, model, "balanced")


def sent_bytes(found: WaysAnswer) -> float:
    """Bytes of the messages of a simulated epoch."""
    tasks = simulate_plan(found.plan, found.request).tasks
    return sum(task.size_bytes or 0 for task in tasks if task.kind is TransferKind.MESSAGE)


@pytest.mark.parametrize(("layer", "expected_gib"), [("gcn", 1.215), ("gcn2", 2.430)])
def test_a_pipeline_sends_what_was_published(layer: str, expected_gib: float) -> None:
    """GNNPipe's logs, Reddit on eight devices: 2 V H (S - 1), and twice that with h⁰."""
    found = answered(full_graph(layer=layer, mirrors=REDDIT_MIRRORS, num_classes=41), 1)
    assert found.message_bytes / GIB == pytest.approx(expected_gib, abs=5e-4)
    assert sent_bytes(found) == pytest.approx(found.message_bytes, rel=1e-9)


def test_graph_parallelism_sends_mirrors_before_every_layer() -> None:
    """And at the end the classes of the other ways' vertices."""
    workload = full_graph(layer="gcn", mirrors=REDDIT_MIRRORS, num_classes=41)
    found = answered(workload, 8)
    mirrors = 56 * round(REDDIT_MIRRORS / 56)
    others = sum(workload.shares(8).rows[1:])
    assert found.message_bytes == 2 * 4 * (32 * 100 * mirrors + 41 * others)
    assert sent_bytes(found) == pytest.approx(found.message_bytes, rel=1e-9)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"layer": "transformer"}, "unknown layer 'transformer'; expected one of gcn, sage"),
        ({"num_vertices": 0}, "num_vertices must be"),
        (
            {"num_vertices": 10, "num_edges": 20, "mirrors": 80},
            "which is 70 in all; got 80",
        ),
        ({"mirrors": {8: 80}}, r"got \{8: 80\}"),
    ],
)
def test_bad_numbers_are_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        full_graph(**options)  # type: ignore[arg-type]
