from __future__ import annotations

import pytest
from helpers.graphs import literal_graph, profile_of

from lightning_gpp.cluster import Cluster, Device, Link
from lightning_gpp.cost import Costs, OpProfile, Profile
from lightning_gpp.planner import PlanRequest, answer, evaluate_plan, validate_plan

CHAIN = literal_graph({"a": "x", "b": "a", "c": "b"})
FAST = Link(bandwidth_bytes_per_s=1e12)
SIZES = (1, 4, 12)
COSTS = Costs(  # a millisecond per operator and one per sample; 1000 bytes per sample are kept
    tuple(
        Profile({n: OpProfile(1e-3, 1e-3 * size, 1000 * size) for n in "abc"}, size)
        for size in SIZES
    )
)
FIXED_BYTES = 3 * 1000 * 4  # parameters, gradients and two values of Adam of three operators
BATCH_BYTES = 12 * 64  # device 0 holds the batch of the user's step, outputs and gradients


def request_of(num_devices: int, minibatch_size: int = 12, **options) -> PlanRequest:
    memory_bytes = options.pop("memory_bytes", None)
    graph = options.pop("graph", CHAIN)
    costs = COSTS if graph is CHAIN else Costs((profile_of(graph),))
    devices = tuple(Device(f"{i}", memory_bytes=memory_bytes) for i in range(num_devices))
    return PlanRequest(graph, Cluster(devices, FAST), costs, minibatch_size, **options)


@pytest.mark.parametrize("num_devices", [1, 3, 4, 5])
def test_the_whole_model_is_on_every_device(num_devices):
    request = request_of(num_devices)
    plan = answer(request, "data_parallel")
    assert plan.planner == "data_parallel"
    (stage,) = plan.stages
    assert stage.operators == ("a", "b", "c")
    assert stage.devices == tuple(range(num_devices))
    assert plan.num_microbatches == num_devices  # a millisecond is saved: one share at a time
    validate_plan(plan, CHAIN, num_devices)
    share_s = 3 * (1e-3 + 1e-3 * 12 / num_devices)
    assert evaluate_plan(plan, request).step_s == pytest.approx(share_s, rel=1e-3)


def test_memory_asks_for_several_microbatches():
    """Six samples per device keep 18 kB; two at a time, twice in flight, 12 kB."""
    step_bytes = BATCH_BYTES + 2 * 6 * 64
    enough = request_of(2, memory_bytes=FIXED_BYTES + step_bytes + 18_000)
    assert answer(enough, "data_parallel").num_microbatches == 2
    less = request_of(2, memory_bytes=FIXED_BYTES + step_bytes + 17_999)
    plan = answer(less, "data_parallel")
    assert plan.num_microbatches == 6 and evaluate_plan(plan, less).is_feasible


def test_a_model_that_does_not_fit_says_so():
    with pytest.raises(ValueError, match=r"no plan of data_parallel fits .* planner=graphpipe"):
        answer(request_of(2, memory_bytes=FIXED_BYTES), "data_parallel")
