"""Ranks that do not run the same versions."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from lightning_gpp.strategy.ranks import starting

HERE = starting.versions_here()


@pytest.mark.parametrize("other", [{}, {"torch": "2.11.0", "Python": "3.10.1"}])
def test_versions_of_all_ranks_are_compared(
    other: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gather(found: list[Any], own: tuple[str, dict[str, str]]) -> None:
        found[:] = own, ("there", HERE | other)

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    if not other:
        starting.check_versions()
        return
    with pytest.raises(RuntimeError) as caught:
        starting.check_versions()
    assert "rank 1 on there has Python 3.10.1, torch 2.11.0" in str(caught.value)
    assert f"torch {HERE['torch']}" in str(caught.value) and "lightning" not in str(caught.value)
