"""What-if factors on a question to a planner: links, devices, operators, input, bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.graphs import literal_graph, profile_of

from lightning_gpp.cluster import Cluster, Device, HostLink, Link, uniform_cluster
from lightning_gpp.cost import ANY_DEVICE, Costs, OpProfile, Profile
from lightning_gpp.planner import PlanRequest, answer, evaluate_plan
from lightning_gpp.simulate.program_costs import (
    Bucket,
    MessageBytes,
    ProgramCosts,
    StageCosts,
    StepCosts,
)
from lightning_gpp.simulate.what_if.changes import WhatIf

CHAIN = literal_graph({"a": "x", "b": "a", "c": "b"})
LINK = Link(1e9, 1e-5, is_shared=True)


def request_of(kinds: str = "uv", device: str = "", graph=CHAIN) -> PlanRequest:
    """Devices of kinds ``u`` and ``v``; ``v`` is twice as fast."""
    devices = tuple(Device(f"{i}", kind) for i, kind in enumerate(kinds))
    cluster = Cluster(devices, LINK, Link(1e8), host_links=(HostLink("host0", Link(5e9, 1e-6)),))
    profiles = [
        Profile({o.name: OpProfile(1e-3 * f, 2e-3 * f, 8) for o in graph}, 4, kind)
        for kind, f in ([(device, 1)] if device else [("u", 1), ("v", 0.5)])
    ]
    return PlanRequest(graph, cluster, Costs(tuple(profiles)), 8)


def forward_s(request: PlanRequest, device: int, operator: str = "a") -> float:
    kind = request.cluster.devices[device].kind
    return request.profile(4, kind).operators[operator].forward_s


def test_nothing_changes_nothing():
    request = request_of()
    assert WhatIf().is_nothing and WhatIf(device={0: 1.0}).is_nothing
    assert WhatIf().request(request) == request
    assert WhatIf().describe() == "nothing"


def test_links():
    found = WhatIf(bandwidth=2, latency=0.5).request(request_of()).cluster
    assert found.host_link == Link(2e9, 0.5e-5, is_shared=True)
    assert found.rack_link == Link(2e8) and found.spine_link is None
    assert found.link(0, 1) == Link(1e10, 0.5e-6)


def test_links_without_a_limit_stay_so():
    free = replace(request_of(), cluster=Cluster((Device("0", "u"),), Link(1e30)))
    assert WhatIf(bandwidth=2).request(free).cluster.host_link == Link(1e30)


def test_all_devices():
    found = WhatIf(compute=4).request(request_of())
    assert [forward_s(found, d) for d in (0, 1)] == pytest.approx([0.25e-3, 0.125e-3])
    backward_s = found.profile(4, "u").operators["b"].backward_s
    assert backward_s == pytest.approx(0.5e-3)


@pytest.mark.parametrize(
    ("kinds", "device", "expected"),
    [
        ("uv", "", [1e-3, 1e-3]),
        ("uu", "u", [1e-3, 2e-3]),
        ("uu", ANY_DEVICE, [1e-3, 2e-3]),
        (["device", "device"], "u", [1e-3, 2e-3]),  # devices of which nothing is said
    ],
)
def test_one_device(kinds, device, expected):
    found = WhatIf(device={1: 0.5}).request(request_of(kinds, device))
    assert [forward_s(found, d) for d in (0, 1)] == pytest.approx(expected)
    assert found.cluster.devices[1].kind.endswith("x0.5")
    plan = answer(found, "graphpipe")
    assert evaluate_plan(plan, found).step_s > 0


def test_operators():
    found = WhatIf(operators={"b": 0.5}).request(request_of())
    assert [forward_s(found, 0, name) for name in "abc"] == pytest.approx([1e-3, 5e-4, 1e-3])


def test_some_operator_takes_time():
    with pytest.raises(ValueError, match=r"what_if\.operators leaves no operator that takes time"):
        WhatIf(operators=dict.fromkeys("abc", 0.0)).request(request_of())


def test_the_step_besides():
    step = StepCosts(2.0, 8.0, LINK, feed_s=1.0, turn_s=2.0, optimizer_s={0: 3.0, 1: 3.0})
    found = WhatIf(compute=2, input=4, device={1: 0.5}).step(step)
    assert (found.data_s, found.input_bytes) == (0.5, 2.0)
    assert (found.feed_s, found.turn_s) == (0.5, 1.0)
    assert found.optimizer_s == {0: 1.5, 1: 3.0}


def test_bytes():
    size = {(0, 1): MessageBytes(8.0, 2.0)}
    costs = ProgramCosts(
        uniform_cluster(2), (StageCosts(1.0, 1.0),) * 2, size, size, (Bucket(0, 4.0),)
    )
    found = WhatIf(bytes=0.5).messages(costs)
    assert found.forward_bytes == found.backward_bytes == {(0, 1): MessageBytes(4.0, 1.0)}
    assert found.buckets == (Bucket(0, 2.0),) and found.stages == costs.stages


def test_names_that_are_not_there():
    request = PlanRequest(CHAIN, uniform_cluster(3), Costs((profile_of(CHAIN),)), 8)
    with pytest.raises(ValueError, match=r"what_if.device.3: .* the cluster has 3 \(0 … 2\)"):
        WhatIf(device={3: 0.5}).request(request)
    with pytest.raises(ValueError, match=r"what_if.operators.d: the model has no operator 'd'"):
        WhatIf(operators={"d": 0.5}).request(request)
