"""Threads that ranks start."""

from __future__ import annotations

import threading

import pytest

from lightning_gpp.runtime import waits


def test_a_signal_may_start_a_thread_while_one_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its handler runs in the midst of whatever the main thread does."""
    started, begin = [], threading.Thread.start

    def start(self: threading.Thread) -> None:
        begin(self)
        if len(started) < 2:
            started.append(self)
            waits.start_thread("handler", lambda: None)

    monkeypatch.setattr(threading.Thread, "start", start)
    waits.start_thread("first", lambda: None)
    assert len(started) == 2
