"""Which schedule runs a plan where nobody named one, and what is said of it.

Four layers in a row on two devices, in mini-batches of 4; a sample keeps 100 bytes in each layer:

    x ─> a ─> b ─> c ─> d

A layer has 1 kB of parameters, of which Adam makes 4 kB. So two layers hold 8,000 bytes, and 800
for all samples of a mini-batch. A value has 64 bytes per sample, and the user's step holds, on the
device of the last stage, the batch (256 bytes) and outputs and gradients of all samples (512): of
9,568 bytes. With ``1f1b`` a pipeline of micro-batches of one sample holds two of them in its first
stage, and one in the last, with the batch, and outputs and gradients of one sample: 8,584 bytes do.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.graphs import literal_graph

from lightning_gpp.cluster import Cluster, Device, Link
from lightning_gpp.cost import Costs, OpProfile, Profile
from lightning_gpp.planner import (
    PLANNERS,
    Plan,
    PlanRequest,
    answer,
    evaluate_plan,
    plan_request,
)
from lightning_gpp.planner import plan_to_run as plan_to_run_module
from lightning_gpp.planner.base import DoesNotFitError
from lightning_gpp.planner.plan_to_run import PlanQuestion, choose_schedule, plan_to_run

GRAPH = literal_graph(dict(zip("abcd", "xabc")))
COSTS = Costs((Profile({name: OpProfile(1.0, 2.0, 100) for name in "abcd"}, 1),))
ALL_BYTES, FEW_BYTES = 9_568, 8_584


def question(memory_bytes: int, **options: object) -> PlanRequest:
    devices = tuple(Device(str(index), memory_bytes=memory_bytes) for index in range(2))
    return plan_request(GRAPH, Cluster(devices), minibatch_size=4, costs=COSTS, **options)


def note(needed: str, memory: str) -> str:
    return (
        "Schedule: 1f1b, as the activations of all micro-batches do not fit into memory (gpipe "
        f"needs {needed} of {memory} on device 1 with this plan, and no other was found); it runs "
        "the step once per micro-batch: the loss must be a mean over samples."
    )


@pytest.mark.parametrize("planner", ["graphpipe", "sequential"])
class TestOfAPlanner:
    def test_all_microbatches_where_they_fit(self, planner: str):
        found = plan_to_run(PlanQuestion(question(ALL_BYTES), planner, None))
        assert (found.request.schedule, found.notes) == ("gpipe", ())
        assert evaluate_plan(found.plan, found.request).is_feasible

    @pytest.mark.parametrize("memory_bytes", [FEW_BYTES, ALL_BYTES - 1])
    def test_few_where_all_do_not_fit(self, planner: str, memory_bytes: int):
        found = plan_to_run(PlanQuestion(question(memory_bytes), planner, None))
        assert found.request.schedule == "1f1b"
        assert found.notes == (note("9.6 kB", f"{memory_bytes / 1000:.1f} kB"),)
        assert evaluate_plan(found.plan, found.request).is_feasible

    def test_an_error_where_nothing_fits_names_what_few_need(self, planner: str):
        with pytest.raises(DoesNotFitError) as error:
            plan_to_run(PlanQuestion(question(FEW_BYTES - 1), planner, None))
        with pytest.raises(DoesNotFitError) as of_few:
            answer(question(FEW_BYTES - 1, schedule="1f1b"), planner)
        assert str(error.value) == str(of_few.value)
        assert 'schedule="1f1b"' not in str(error.value)

    def test_who_names_a_schedule_gets_it(self, planner: str):
        assert (
            plan_to_run(PlanQuestion(question(ALL_BYTES), planner, "1f1b")).request.schedule
            == "1f1b"
        )
        with pytest.raises(DoesNotFitError) as error:
            plan_to_run(PlanQuestion(question(FEW_BYTES), planner, "gpipe"))
        assert 'schedule="1f1b" (it runs the step once per micro-batch' in str(error.value)


@pytest.mark.parametrize("planner", sorted(PLANNERS))
def test_one_f_one_b_may_fit_where_the_other_does_not(planner: str):
    """One device that holds a micro-batch of the whole model, but not all four."""
    layers = replace(question(10**6).cluster, devices=(Device("0", memory_bytes=16_784),))
    tight = replace(question(10**6, num_microbatches=4), cluster=layers)
    if planner == "balanced":  # asks nobody for memory
        assert plan_to_run(PlanQuestion(tight, planner, None)).request.schedule == "1f1b"
        return
    with pytest.raises(DoesNotFitError) as error:
        answer(replace(tight, schedule="gpipe"), planner)
    assert 'schedule="1f1b"' in str(error.value)
    assert plan_to_run(PlanQuestion(tight, planner, None)).request.schedule == "1f1b"
    less = replace(layers, devices=(Device("0", memory_bytes=16_783),))
    with pytest.raises(DoesNotFitError, match="into the memory of 1 devices"):
        plan_to_run(PlanQuestion(replace(tight, cluster=less), planner, None))


def test_a_slower_plan_that_holds_all_is_chosen_before_a_faster_one_that_holds_few():
    """Two kinds of devices: only the slow ones hold all micro-batches of a half.

    ``1f1b`` would take the fast ones, each with half of the layers.
    """
    fast = Profile({name: OpProfile(1.0, 2.0, 100) for name in "abcd"}, 1, "fast")
    slow = Profile({name: OpProfile(9.0, 9.0, 100) for name in "abcd"}, 1, "slow")
    devices = (
        *(Device(f"slow{index}", "slow", ALL_BYTES) for index in range(2)),
        *(Device(f"fast{index}", "fast", FEW_BYTES) for index in range(2)),
    )
    request = plan_request(
        GRAPH, Cluster(devices), minibatch_size=4, costs=Costs((fast, slow)), max_replicas=1
    )
    found = plan_to_run(PlanQuestion(request, "graphpipe", None))
    few = plan_to_run(PlanQuestion(request, "graphpipe", "1f1b"))
    assert found.request.schedule == "gpipe" and not found.notes
    step_s, few_s = (evaluate_plan(one.plan, one.request).step_s for one in (found, few))
    assert few_s < step_s

    told = plan_to_run(PlanQuestion(request, "graphpipe", None, compares=True))
    assert (told.plan, told.request) == (found.plan, found.request)
    mean = "it runs the step once per micro-batch: the loss must be a mean over samples."
    assert told.notes == (
        'Schedule: schedule="1f1b" would be 69 % faster (30.0 s instead of 96.0 s a step), and '
        f'schedule="fastest" takes it; {mean}',
    )
    fastest = plan_to_run(PlanQuestion(request, "graphpipe", "fastest"))
    assert (fastest.plan, fastest.request) == (few.plan, few.request)
    assert fastest.notes == (
        "Schedule: 1f1b, predicted to be 69 % faster (30.0 s instead of 96.0 s a step with gpipe); "
        f"{mean}",
    )


def test_a_schedule_that_is_hardly_faster_is_not_told_of():
    for schedule in (None, "fastest"):
        asked = PlanQuestion(question(10**6), "graphpipe", schedule, compares=True)
        found = plan_to_run(asked)
        assert (found.request.schedule, found.notes) == ("gpipe", ())


def test_only_a_lack_of_memory_is_a_reason_to_hold_few():
    def search(request: PlanRequest) -> Plan:
        raise ValueError(f"no plan with {request.schedule}")

    with pytest.raises(ValueError, match="no plan with gpipe"):
        choose_schedule(question(ALL_BYTES), None, search)


@pytest.mark.parametrize(
    ("state", "memory_bytes", "is_whole"),
    [({}, 10**6, False), ({"b": ("mean",)}, 10**6, True), ({"b": ("mean",)}, 17_800, False)],
)
def test_statistics_on_one_device_are_those_of_the_whole_mini_batch(
    state: dict[str, tuple[str, ...]], memory_bytes: int, is_whole: bool
):
    """Also where a sample at a time was measured to be faster; but not where that alone fits."""
    graph = literal_graph(dict(zip("abcd", "xabc")), state=state)
    sizes = {1: OpProfile(1.0, 2.0, 100), 4: OpProfile(5.0, 10.0, 400)}
    profiles = (Profile(dict.fromkeys("abcd", each), size) for size, each in sizes.items())
    asked = plan_request(
        graph,
        Cluster((Device("0", memory_bytes=memory_bytes),)),
        minibatch_size=4,
        costs=Costs(tuple(profiles)),
    )
    found = plan_to_run(PlanQuestion(asked))
    assert (found.plan.num_microbatches == 1) == is_whole


class TestInputsAhead:
    """A chain on two devices: 256 bytes of inputs go from that of the loss to the first one."""

    def asked(self, bytes_per_s: float, schedule: str = "gpipe") -> PlanRequest:
        cluster = Cluster((Device("0"), Device("1")), Link(bytes_per_s, 0.0))
        asked = plan_request(GRAPH, cluster, minibatch_size=4, costs=COSTS, schedule=schedule)
        return replace(asked, inputs_ahead=True)

    def found(self, asked: PlanRequest) -> PlanRequest:
        return plan_to_run(PlanQuestion(asked, "sequential", asked.schedule, True)).request

    def test_where_a_step_has_time_for_them(self, monkeypatch: pytest.MonkeyPatch):
        assert self.found(self.asked(1000.0)).feeds_ahead
        assert not self.found(self.asked(1000.0, "1f1b")).feeds_ahead
        assert self.found(self.asked(1.0)).feeds_ahead  # activations take as long, and gradients
        monkeypatch.setattr(plan_to_run_module, "FEED_PART", 0.25)
        assert not self.found(self.asked(1.0)).feeds_ahead
        assert self.found(self.asked(1000.0)).feeds_ahead

    def test_they_cost_memory_and_no_time(self):
        asked = self.asked(64.0)
        plan = answer(replace(asked, max_replicas=1), "sequential")
        here, there = (
            evaluate_plan(plan, replace(asked, inputs_ahead=ahead)) for ahead in (False, True)
        )
        assert there.step_s < here.step_s
        more = [b.memory_bytes - a.memory_bytes for a, b in zip(here.devices, there.devices)]
        assert more == [256, 512]  # what the first stage reads of the next batch; all of it, twice
