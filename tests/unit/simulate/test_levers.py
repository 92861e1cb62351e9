"""Levers of S-SGD by hand: what becomes faster, and what then bounds the step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_gpp.cluster import Link, uniform_cluster
from lightning_gpp.simulate.program_costs import StepCosts
from lightning_gpp.simulate.ssgd.layers import Layer
from lightning_gpp.simulate.ssgd.program import Ssgd
from lightning_gpp.simulate.what_if.changes import WhatIf
from lightning_gpp.simulate.what_if.levers import levers, speedups

# Two devices: a sum takes its bytes over the bandwidth, and 2 x 0.5 s of latency.
LAYERS = [Layer("first", 1.0, 2.0, 2.0), Layer("second", 1.0, 2.0, 2.0)]
CASE = Ssgd(
    LAYERS,
    uniform_cluster(2, Link(bandwidth_bytes_per_s=1.0, latency_s=0.5)),
    "naive",
    StepCosts(data_s=1.0),
    samples_per_device=4,
)


def test_levers_of_a_naive_step():
    """1 s of input, 6 s of computing, 2 x 3 s of sums: 13 s for 8 samples."""
    assert CASE.simulate().step_s == pytest.approx(13.0)
    found = {lever.name: lever for lever in levers(CASE)}
    steps = {name: lever.step_s for name, lever in found.items()}
    assert steps == pytest.approx(
        {
            "twice the devices": 1 + 6 + 2 * (6 * 0.5 + 6 * 0.5),  # six rounds of half a byte
            "overlap: merged": 6 + 4,  # to wait two seconds for the second would save only one
            "overlap: wait-free": 6 + 4,  # two seconds of the first sum are hidden
            "overlap: pre-fetch": 6 + 6,
            "devices twice as fast": 1 + 3 + 6,
            "twice the bandwidth": 1 + 6 + 2 * 2,
            "half the bytes": 1 + 6 + 2 * 2,
            "half the latency": 1 + 6 + 2 * 2.5,
            "input twice as fast": 0.5 + 12,
        }
    )


def test_the_best_lever_comes_first():
    found = levers(CASE)
    gains = [lever.gain for lever in found if lever.gain is not None]
    assert gains == sorted(gains, reverse=True)
    for lever in found:
        samples = 16 if lever.name == "twice the devices" else 8
        assert lever.step_s is not None and lever.samples_per_s == samples / lever.step_s
        assert lever.gain == pytest.approx(lever.samples_per_s / (8 / 13) - 1)


def test_speed_up_is_of_throughput_with_as_many_samples_per_device():
    cases = {
        n: replace(CASE, cluster=uniform_cluster(n, CASE.cluster.host_link)) for n in (1, 2, 4)
    }
    found = speedups(cases)
    assert found[1] == 1.0
    assert found[2] == pytest.approx(2 * 7 / 13)
    assert found[4] == pytest.approx(4 * 7 / 19)


def test_what_if_of_layers_and_devices():
    slow = CASE.changed(WhatIf(device={1: 0.5}))  # the other device waits
    assert slow.simulate().step_s == pytest.approx(13 + 6)
    light = CASE.changed(WhatIf(operators={"second": 0.0}))
    assert light.simulate().step_s == pytest.approx(13 - 3)
    with pytest.raises(ValueError, match=r"what_if.device.2: there is no device 2; .* 2 \(0 … 1\)"):
        CASE.changed(WhatIf(device={2: 0.5}))
    with pytest.raises(ValueError, match=r"no operator 'secnd' among its 2; such as second"):
        CASE.changed(WhatIf(operators={"secnd": 0.5}))


@pytest.mark.parametrize(
    "factors",
    [{"bandwidth": -1.0}, {"bandwidth": 0.0}, {"compute": float("inf")}, {"bytes": -0.5},
     {"latency": float("nan")}, {"device": {0: 0.0}}, {"operators": {"a": -2}}],
)  # fmt: skip
def test_a_factor_that_makes_no_sense(factors):
    (name,) = factors
    with pytest.raises(ValueError, match=rf"what_if\.{name}.* is a factor .* got"):
        WhatIf(**factors)
