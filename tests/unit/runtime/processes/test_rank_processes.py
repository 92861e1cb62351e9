"""Processes end after an error or an interrupt, and with the process that started them."""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from helpers import long_processes
from helpers.processes import wait_until_ended

from lightning_gpp.runtime.processes import rank_processes

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("interruptible")]

LIMIT_S = 100.0


def start(*, heeds_interrupts: bool = True) -> BaseProcess:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    target = functools.partial(long_processes.sleep, heeds_interrupts=heeds_interrupts)
    process = context.Process(target=target, args=(there,), daemon=True)
    process.start()
    assert here.recv() == "ready"
    return process


@pytest.fixture
def impatient_user() -> Iterator[threading.Timer]:
    """Interrupts this process soon after it is started."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.2, signal.pthread_kill, [main, signal.SIGUSR1])
    yield timer
    timer.cancel()
    signal.signal(signal.SIGUSR1, before)


def test_a_process_that_was_not_told_is_interrupted() -> None:
    process = start()
    rank_processes.end_processes([process], untold_s=0.0, patience_s=LIMIT_S)
    assert process.exitcode not in (None, 0, -signal.SIGKILL)


def test_a_process_that_heeds_no_interrupt_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    process = start(heeds_interrupts=False)
    with caplog.at_level(logging.WARNING):
        rank_processes.end_processes([process], untold_s=0.0, patience_s=0.1)
    assert process.exitcode == -signal.SIGKILL
    assert f"processes [{process.pid}] did not end within 0.1 s" in caplog.text


def test_a_second_interrupt_kills_at_once(impatient_user: threading.Timer) -> None:
    process = start(heeds_interrupts=False)
    impatient_user.start()
    with pytest.raises(KeyboardInterrupt):
        rank_processes.end_processes([process], untold_s=0.0, patience_s=long_processes.LONG_S)
    assert process.exitcode == -signal.SIGKILL


def test_after_an_error_only_processes_of_the_body_end() -> None:
    other, started = start(), []

    def body() -> None:
        started.append(start())
        raise OSError("no second process")

    with pytest.raises(OSError, match="no second"), rank_processes.ended_after_error():
        body()
    assert started[0].exitcode is not None
    assert other.is_alive()
    other.kill()
    other.join()


def test_a_process_ends_with_its_starter(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    starter = subprocess.Popen(
        [sys.executable, long_processes.__file__, str(path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    end = time.monotonic() + LIMIT_S
    while not (path.exists() and path.read_text()):
        assert starter.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    starter.kill()
    starter.wait()
    wait_until_ended([int(path.read_text())], LIMIT_S)
