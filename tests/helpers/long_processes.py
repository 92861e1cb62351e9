"""Processes that do not end by themselves. Imports neither torch nor Lightning: they start fast."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from lightning_gpp.runtime.processes.rank_processes import end_with_starter

LONG_S = 100.0


def sleep(ready: Connection, *, heeds_interrupts: bool = True) -> None:
    """Says that it is there and sleeps, through interrupts if it does not heed them."""
    if not heeds_interrupts:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    ready.send("ready")
    time.sleep(LONG_S)


def sleep_with_starter(ready: Connection) -> None:
    """As a rank that sees no interrupt."""
    end_with_starter(patience_s=0.1)
    sleep(ready, heeds_interrupts=False)


def main(path: Path) -> None:
    """Starts such a process, writes its id to a file, and sleeps."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=sleep_with_starter, args=(there,))
    process.start()
    here.recv()
    path.write_text(str(process.pid))
    time.sleep(LONG_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
