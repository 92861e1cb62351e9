"""Ends the processes of all ranks after an error, after Ctrl-C, and with their parent.

Python waits at its exit for every process that it has started, and a signal to the starting
process alone (the stop button of a notebook, ``kill -INT``) does not reach the ranks. A rank that
waits inside torch for another one sees no Ctrl-C before that wait is over, which may take as long
as the limit of the wait.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Iterable, Iterator
from multiprocessing.process import BaseProcess

from lightning_gpp.runtime.waits import start_thread

log = logging.getLogger(__name__)

UNTOLD_S = 2.0
"""Time to end for processes that may have got the terminal's Ctrl-C; then they are told."""

PATIENCE_S = 10.0
"""Time to end for processes that were told to."""


@contextlib.contextmanager
def ended_after_error() -> Iterator[None]:
    """Ends the processes that the body has started if it ends in an error or in Ctrl-C."""
    others = set(multiprocessing.active_children())
    try:
        yield
    except BaseException:
        end_processes(set(multiprocessing.active_children()) - others)
        raise


def end_processes(
    processes: Iterable[BaseProcess], untold_s: float = UNTOLD_S, patience_s: float = PATIENCE_S
) -> None:
    """Waits for processes that should end, interrupts them, and kills what is left.

    A second Ctrl-C kills at once.

    Args:
        processes: children of this process.
        untold_s: seconds before they are interrupted.
        patience_s: seconds from there until they are killed.
    """
    try:
        for process in _still_alive(processes, untold_s):
            assert process.pid is not None
            os.kill(process.pid, signal.SIGINT)
        if stubborn := _still_alive(processes, patience_s):
            log.warning(
                "processes %s did not end within %g s after an interrupt; killing them",
                [process.pid for process in stubborn],
                patience_s,
            )
    finally:
        for process in _still_alive(processes, 0.0):
            process.kill()
            process.join()


def _still_alive(processes: Iterable[BaseProcess], limit_s: float) -> list[BaseProcess]:
    """Waits for processes; those that do not end in time."""
    deadline = time.monotonic() + limit_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    return [process for process in processes if process.is_alive()]


def end_with_starter(patience_s: float = PATIENCE_S) -> None:
    """Ends this process some seconds after the one that started it has gone, whatever it does.

    torch asks the kernel for an interrupt at that moment. It does not come when the starter went
    before that, is not seen during a wait inside torch, and is ignored in a job in the background.
    """
    starter = multiprocessing.parent_process()
    assert starter is not None, "no process of multiprocessing"

    def watch() -> None:
        starter.join()
        time.sleep(patience_s)
        os._exit(1)

    start_thread("end-with-starter", watch)
