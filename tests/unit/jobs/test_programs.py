"""Searches for SPMD programs that end without one."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_gpp.jobs.spmd import NoProgramError, program_within
from lightning_gpp.spmd import plan
from lightning_gpp.spmd.search.labels import TooManyExpansionsError


def test_a_search_with_too_many_programs_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan_hap(*_: Any) -> None:
        raise TooManyExpansionsError

    monkeypatch.setattr(plan, "plan_hap", plan_hap)
    problem: Any = type("Problem", (), {"graph": None, "machine": None})
    with pytest.raises(NoProgramError, match="no program was found among 200000 partial ones"):
        program_within(problem, "hap", None)
