"""The simulator on random programs."""

from __future__ import annotations

from helpers.simulations import random_simulations, send_seconds
from hypothesis import given, settings

from lightning_gpp.schedule import dry_run
from lightning_gpp.simulate import simulate
from lightning_gpp.simulate.message_costs import compute_s


@given(random_simulations(with_replicas=False))
@settings(max_examples=60, deadline=None)
def test_without_sums_it_is_the_dry_run(case):
    def action_s(action):
        if action.kind.is_compute:
            return compute_s(case.costs, action)
        return send_seconds(case, action) if action.kind.is_send else 0.0

    expected = dry_run(case.program, action_s)
    found = simulate(case.program, case.costs)
    assert found.step_s == expected.step_s
    starts = {task.action: task.start_s for task in found.tasks if task.device is not None}
    assert starts == expected.start_s
