"""What is said to make an infeasible problem feasible does so."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
from helpers.graphs import literal_graph
from helpers.series_parallel import shapes, tree_of
from helpers.small_requests import Setting, random_request

from lightning_gpp.cluster import Cluster, Device
from lightning_gpp.cost import Costs, OpProfile, Profile
from lightning_gpp.planner import PlanRequest, answer, evaluate_plan
from lightning_gpp.planner.base import HOLD_FEWER
from lightning_gpp.planner.make_plan import plan_request

MEMORY = re.compile(r"(\d+) devices need .* \((\d+) bytes\) of memory each")
DEVICES = re.compile(r"with the memory they have, (\d+) devices(?: like (\S+))? would do")
RECOMPUTE = re.compile(r"recomputation would do \(may_recompute=True; recompute=true on")


def with_memory(request: PlanRequest, memory_bytes: int) -> PlanRequest:
    devices = tuple(replace(d, memory_bytes=memory_bytes) for d in request.cluster.devices)
    return replace(request, cluster=replace(request.cluster, devices=devices))


def with_devices(request: PlanRequest, count: int, like: str | None) -> PlanRequest:
    by_name = {device.name: device for device in request.cluster.devices}
    model = by_name[like] if like else request.cluster.devices[0]
    devices = tuple(replace(model, name=str(index)) for index in range(count))
    return replace(request, cluster=Cluster(devices, request.cluster.slowest_link))


def refusal(request: PlanRequest, planner: str) -> str | None:
    """Why there is no plan; None where there is one, which fits."""
    try:
        plan = answer(request, planner)
    except ValueError as error:
        return str(error)
    assert evaluate_plan(plan, request).is_feasible
    return None


def remedied(request: PlanRequest, text: str) -> dict[str, PlanRequest]:
    """The problem with each remedy that a text names."""
    found = {}
    if HOLD_FEWER in text:
        found["schedule"] = replace(request, schedule="1f1b")
    if RECOMPUTE.search(text):
        found["recomputation"] = replace(request, may_recompute=True)
    if match := MEMORY.search(text):
        assert int(match[1]) == request.num_devices
        found["memory"] = with_memory(request, int(match[2]))
    if match := DEVICES.search(text):
        assert int(match[1]) > request.num_devices
        found["devices"] = with_devices(request, int(match[1]), match[2])
    return found


@pytest.mark.sampled(5)
@pytest.mark.parametrize("planner", ["graphpipe", "sequential"])
@pytest.mark.parametrize("kinds", ["aa", "aaa", "aab"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_every_remedy_that_is_named_works(planner, kinds, schedule):
    """Random branchy models in a quarter of the memory that they might need."""
    tried = set()
    for seed in range(6):
        rng = random.Random(f"{kinds} {seed}")
        setting = Setting(kinds, has_messages=True, has_memory=True, schedule=schedule)
        drawn = random_request(tree_of(rng.choice(shapes(5))), setting, rng)
        memory = min(device.memory_bytes or 0 for device in drawn.cluster.devices)
        request = with_memory(drawn, memory // 3)
        text = refusal(request, planner)
        for name, changed in remedied(request, text or "").items():
            assert refusal(changed, planner) is None, (name, text)
            tried.add(name)
    assert "memory" in tried
    assert ("schedule" in tried) == (schedule == "gpipe")


def layers(activation_bytes: int, memory_bytes: int, num_devices: int = 2) -> PlanRequest:
    """Four layers in a row with 4000 bytes of weights, gradients and optimizer each."""
    graph = literal_graph(dict(zip("abcd", "xabc")))
    costs = Costs((Profile({n: OpProfile(1.0, 2.0, activation_bytes) for n in "abcd"}, 1),))
    devices = tuple(Device(str(i), memory_bytes=memory_bytes) for i in range(num_devices))
    return plan_request(graph, Cluster(devices), minibatch_size=4, costs=costs)


def test_the_smallest_memory_is_the_smallest():
    """A few per cent less than what is named does not do."""
    request = layers(activation_bytes=100, memory_bytes=5_000)
    found = remedied(request, refusal(request, "graphpipe") or "")
    assert refusal(found["memory"], "graphpipe") is None
    needed = found["memory"].cluster.devices[0].memory_bytes
    assert refusal(with_memory(request, int(0.97 * needed)), "graphpipe")


def test_the_fewest_devices_are_the_fewest():
    request = layers(activation_bytes=10, memory_bytes=4_500)
    found = remedied(request, refusal(request, "graphpipe") or "")
    assert found["devices"].num_devices == 4
    assert refusal(found["devices"], "graphpipe") is None
    assert refusal(with_devices(request, 3, None), "graphpipe")


def test_recomputation_is_named_only_where_it_does():
    heavy = layers(activation_bytes=3_000, memory_bytes=15_000)
    text = refusal(heavy, "graphpipe") or ""
    assert refusal(remedied(heavy, text)["recomputation"], "graphpipe") is None
    weights = layers(activation_bytes=10, memory_bytes=4_500)
    assert "recomputation" not in remedied(weights, refusal(weights, "graphpipe") or "")
