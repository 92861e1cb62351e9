"""Ranks that ``torchrun`` may start again."""

from __future__ import annotations

import warnings

import pytest

from lightning_gpp.strategy.ranks.starting import warn_of_old_addresses


def started_by_torchrun(patch: pytest.MonkeyPatch, most_restarts: str, shares_store: bool) -> None:
    patch.setenv("TORCHELASTIC_MAX_RESTARTS", most_restarts)
    patch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(shares_store))


def test_addresses_of_before_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    started_by_torchrun(monkeypatch, "3", shares_store=True)
    with pytest.warns(UserWarning, match="max-restarts=3.*TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        warn_of_old_addresses()


@pytest.mark.parametrize(("most_restarts", "shares_store"), [("0", True), ("3", False)])
def test_no_warning_where_nothing_is_in_the_way(
    monkeypatch: pytest.MonkeyPatch, most_restarts: str, shares_store: bool
) -> None:
    started_by_torchrun(monkeypatch, most_restarts, shares_store)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_old_addresses()
