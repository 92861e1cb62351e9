"""What is said of work that takes long, with a clock that only goes on when it is told to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

from lightning_gpp.common import progress
from lightning_gpp.common.progress import doing


class FakeClock:
    """A clock whose timers go off when it is moved past them."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.timers: list[FakeTimer] = []

    def timer(self, delay_s: float, call: Callable[..., None], args: tuple[str]) -> FakeTimer:
        """Like ``threading.Timer``."""
        self.timers.append(FakeTimer(self, delay_s, partial(call, *args)))
        return self.timers[-1]

    def monotonic(self) -> float:
        return self.now_s

    def work(self, seconds: float) -> None:
        """Time passes."""
        self.now_s += seconds
        for timer in self.timers:
            if timer.state == "started" and timer.at_s <= self.now_s:
                timer.state = "over"
                timer.call()


class FakeTimer:
    """Calls something when its clock is there."""

    def __init__(self, clock: FakeClock, delay_s: float, call: Callable[[], None]) -> None:
        self.at_s, self.call, self.state = clock.now_s + delay_s, call, "made"

    def start(self) -> None:
        self.state = "started"

    def cancel(self) -> None:
        self.state = "over"

    def join(self) -> None:
        assert self.state == "over", "somebody would wait"


@contextmanager
def measuring(clock: FakeClock, lines: list[str]) -> Iterator[None]:
    with (
        mock.patch.object(progress.time, "monotonic", clock.monotonic),
        mock.patch.object(progress.threading, "Timer", clock.timer),
        doing("Measuring", lines.append),
    ):
        yield
    assert [timer.state for timer in clock.timers] == ["over"]


def test_long_work_is_spoken_of_while_it_lasts_and_when_it_is_done() -> None:
    clock, lines = FakeClock(), list[str]()
    with measuring(clock, lines):
        clock.work(2.1)
        assert lines == ["Measuring ..."]
        clock.work(4.1)
    assert lines == ["Measuring ...", "Measuring took 6.20 s."]
