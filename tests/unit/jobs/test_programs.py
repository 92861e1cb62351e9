"""Searches for SPMD programs that end without one."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_gpp.jobs.spmd import NoProgramError, program_within
from lightning_gpp.spmd import plan
from lightning_gpp.spmd.search.find import NoProgramFitsError


def test_a_search_without_a_program_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan_hap(*_: Any) -> None:
        raise NoProgramFitsError("16 GB are too little")

    monkeypatch.setattr(plan, "plan_hap", plan_hap)
    problem: Any = type("Problem", (), {"graph": None, "machine": None})
    with pytest.raises(NoProgramError, match="16 GB are too little"):
        program_within(problem, "hap", None)
