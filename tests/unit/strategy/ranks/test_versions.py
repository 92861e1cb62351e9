"""Ranks, as threads, that do not run the same versions."""

from __future__ import annotations

import threading

import pytest
from helpers.threads.start import of_ranks
from helpers.threads.transport import ThreadHub

from lightning_gpp.strategy.ranks import starting
from lightning_gpp.strategy.ranks.control import Control

HERE = starting.versions_here()


@pytest.mark.parametrize("other", [{}, {"torch": "2.11.0", "Python": "3.10.1"}])
def test_versions_of_all_ranks_are_compared(
    other: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they know is that of the thread's rank."""
    hub, errors = ThreadHub(2), dict[int, str]()
    of_rank = {0: HERE, 1: HERE | other}
    monkeypatch.setattr(
        starting, "versions_here", lambda: of_rank[int(threading.current_thread().name)]
    )

    def check(rank: int) -> None:
        try:
            starting.check_versions(Control(hub.transport(rank), 10.0), None)
        except RuntimeError as error:
            errors[rank] = str(error)

    of_ranks(2, check)
    if not other:
        assert not errors
        return
    assert set(errors) == {0}
    assert "rank 1 on" in errors[0] and "Python 3.10.1, torch 2.11.0" in errors[0]
    assert f"torch {HERE['torch']}" in errors[0] and "lightning" not in errors[0]
