"""Errors that nobody catches: their tracebacks have the user's frames, and those that lead on."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import pytest
from torch import Tensor, nn, zeros

from lightning_gpp.capture import capture
from lightning_gpp.runtime.waits import Waits
from lightning_gpp.strategy.ranks.short_traceback import SHOWS_ALL, shorten

WIDTH = 3


class Model(nn.Module):
    def forward(self, x: object) -> object:
        return nn.functional.linear(x, zeros(WIDTH, WIDTH))  # type: ignore[arg-type]


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> object:
        return self.layer(x)


def functions_of(call: Callable[[], object]) -> list[str]:
    """Names of the functions in the traceback of a failing call, once it is shortened."""
    with pytest.raises(RuntimeError) as caught:
        call()
    count = len(traceback.extract_tb(caught.value.__traceback__))
    said = shorten(caught.value)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert said.startswith(f"({count - len(names)} frames") or (not said and len(names) == count)
    return names[1:]


def test_frames_between_the_users_go(monkeypatch: pytest.MonkeyPatch) -> None:
    def call() -> object:
        return nn.Sequential(Model())(zeros(1, WIDTH + 1))

    assert functions_of(call) == ["call", "forward"]
    monkeypatch.setenv(SHOWS_ALL, "full")
    assert len(functions_of(call)) > 3


def test_what_follows_the_users_last_frame_stays() -> None:
    def call() -> object:
        return nn.Linear(WIDTH, WIDTH)(zeros(1, WIDTH + 1))

    assert functions_of(call)[:3] == ["call", "_wrapped_call_impl", "_call_impl"]


def test_how_a_forward_is_captured_is_left_out() -> None:
    def call() -> object:
        return capture(Layered(), (zeros(2, WIDTH + 1),), {})

    assert functions_of(call)[:-1] == ["call", "forward"]


def test_of_our_own_errors_only_the_end_is_shown() -> None:
    waits = Waits()
    waits.abort(RuntimeError("rank 1 has ended"))

    def call() -> object:
        return waits.until(lambda: None, 1.0)

    assert len(functions_of(call)) == 2
