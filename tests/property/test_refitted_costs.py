"""What is refitted from a simulated step are the costs that it was simulated with."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.refits import STEP, Question, questions
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpp.cost import Costs
from lightning_gpp.simulate import simulate
from lightning_gpp.simulate.plan_costs import program_costs
from lightning_gpp.simulate.program_costs import StepCosts
from lightning_gpp.simulate.recorded import refit
from lightning_gpp.simulate.timeline.predicted import predicted_timeline


@given(questions(), st.sampled_from([StepCosts(), STEP]))
def test_stages_take_what_was_recorded(question: Question, step: StepCosts) -> None:
    asked = question.request
    step = replace(
        step,
        optimizer_s={d: 1e-3 + d * 1e-4 for d in range(question.plan.num_devices)},
    )
    true = program_costs(question.plan, asked, step=step)
    timeline = predicted_timeline(simulate(question.program, true))
    wrong = replace(asked, costs=Costs((question.other_profile,)))
    found = refit([timeline], question.program, question.plan, wrong)
    again = program_costs(
        question.plan,
        found.request(wrong),
        step=found.step_costs(question.plan),
    )
    for mine, known in zip(again.stages, true.stages, strict=True):
        assert mine.forward_s == pytest.approx(known.forward_s, rel=1e-6, abs=1e-12)
        assert mine.backward_s == pytest.approx(known.backward_s, rel=1e-6, abs=1e-12)
    for name in ("data_s", "prepare_s", "feed_s", "action_s"):
        assert getattr(again.step, name) == pytest.approx(getattr(step, name), abs=1e-12), name
    once = question.program.has_turn
    assert once or asked.schedule != "gpipe"
    assert again.step.turn_s == pytest.approx(step.turn_s if once else 0.0, abs=1e-12)
    assert again.step.optimizer_s == pytest.approx(step.optimizer_s)
    assert found.step_s == pytest.approx(timeline.step_s)
