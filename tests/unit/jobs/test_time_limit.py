"""Searches in a process of their own that is ended at a limit."""

from __future__ import annotations

import os
from dataclasses import replace
from multiprocessing import active_children

import pytest
from helpers.graphs import literal_graph, profile_of

from lightning_gpp.jobs.compare import compared
from lightning_gpp.jobs.search import OutOfTimeError, call_within, search
from lightning_gpp.planner.make_plan import plan_request
from lightning_gpp.planner.plan_to_run import PlanQuestion

CHAIN = literal_graph({"a": "x", "b": "a", "c": "b"})
REQUEST = plan_request(CHAIN, 2, minibatch_size=8, costs=profile_of(CHAIN))
QUESTION = PlanQuestion(REQUEST, "graphpipe", "1f1b")


def spin() -> None:
    """Never returns and looks at no clock."""
    while True:
        pass


def test_a_call_is_ended_at_its_limit():
    with pytest.raises(OutOfTimeError, match="no answer within 1 s"):
        call_within(1.0, spin)
    assert not active_children()


def test_a_search_that_is_ended_is_a_row():
    """No process starts in a hundredth of a second."""
    row = compared(QUESTION, 0.01)
    assert row["step_s"] is None and row["search_s"] == 0.01
    assert row["error"] == "no answer within 0.01 s; a larger job.limit_s gives it longer"


def test_a_search_in_time_finds_what_it_finds_anyway():
    found, anyway = search(QUESTION, 60.0), search(QUESTION)
    assert found.evaluation == anyway.evaluation


def test_faults_are_not_taken_for_answers():
    with pytest.raises(RuntimeError, match="find failed in a process of its own"):
        search(replace(QUESTION, request=None), 60.0)
    with pytest.raises(RuntimeError, match="ended without an answer, with exit code 3"):
        call_within(60.0, os._exit, 3)


def refuse() -> None:
    raise ValueError("16 GB are too little")


def test_a_refusal_in_another_process_is_one_here():
    with pytest.raises(ValueError, match=r"^16 GB are too little$"):
        call_within(60.0, refuse)
