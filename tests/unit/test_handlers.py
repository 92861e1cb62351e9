"""Every reader of programs knows what to do with every kind of action."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from lightning_gpp.runtime import executor, measured
from lightning_gpp.schedule import Kind


@pytest.mark.parametrize(
    ("reader", "handlers"),
    [
        ("the executor", executor.HANDLERS),
        ("pictures of recorded steps", measured.SPANS),
    ],
)
def test_a_reader_handles_every_kind_of_action(reader: str, handlers: Mapping[Kind, Any]) -> None:
    lacking = [kind.name for kind in Kind if kind not in handlers]
    assert not lacking, f"{reader} has no handler for {', '.join(lacking)}"
