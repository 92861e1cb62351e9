"""Heartbeats: ranks notice at once who has ended, and within seconds who is frozen or cut off.

Between rank 0 and every other rank messages go over a transport of their own, served by threads, so
that they tell of a rank whatever its main thread waits for and whatever else is on its way.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_gpp.runtime.payload import Payload, pack_object, unpack
from lightning_gpp.runtime.processes.groups import host_identity, of_every_rank
from lightning_gpp.runtime.transport.process_transport import CLOSED, ProcessTransport
from lightning_gpp.runtime.transport.transport import Tag
from lightning_gpp.runtime.waits import start_thread

BEAT_S = 1.0
"""Between two signs of life."""

SILENCE_S = 10.0
"""Without a sign of life a rank is taken for frozen or cut off."""

LEAVE_S = 5.0
"""Limit of waiting for the goodbye of the others."""

ENDED = "ended without a word: it was killed (out of memory?) or it crashed"
SILENT = f"gave no sign of life for {SILENCE_S:g} s: it is stopped or frozen, or the network is cut"

_TAG: Tag = (0, 0, 0, 0)


@dataclass(slots=True)
class _Process:
    """The process of a rank.

    Attributes:
        silent_s: seconds without a sign of life.
        has_left: whether nothing more is expected.
    """

    pid: int
    parent: int
    host: str
    identity: str
    silent_s: float = 0.0
    has_left: bool = False

    @property
    def state(self) -> str | None:
        """The letter that the kernel has for it (``"T"``: stopped); None where it is not seen.

        A silent process that runs holds Python's lock in a long call (pickling gigabytes).
        """
        if self.identity != host_identity() or not Path("/proc").is_dir():
            return None
        try:
            status = Path("/proc", str(self.pid), "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return "X"
        except OSError:
            return None
        return status.rpartition(")")[2].split()[0]


class Heartbeats:
    """Connections for heartbeats and errors: rank 0 has one to every other rank.

    All ranks make theirs at the same time. The callbacks run in threads of this object.

    Args:
        on_message: called with a rank and what it sent.
        on_lost: called once with a rank that is gone and why, in words that follow "rank 3".
    """

    def __init__(
        self, on_message: Callable[[int, Any], None], on_lost: Callable[[int, str], None]
    ) -> None:
        self._on_message, self._on_lost = on_message, on_lost
        self._stop, self._sending = threading.Event(), threading.Lock()
        mine = _Process(os.getpid(), os.getppid(), socket.gethostname(), host_identity())
        found = of_every_rank(mine)
        others = range(1, len(found)) if dist.get_rank() == 0 else (0,)
        self._others: dict[int, _Process] = {other: found[other] for other in others}
        with self._sending:  # who listens already may want to answer
            self._transport = ProcessTransport(torch.device("cpu"), peers=others, mailbox=self)
        self._watching = start_thread("heartbeats", self._watch)

    def send(self, message: Any) -> None:
        """Sends an object: rank 0 to all others, the others to rank 0.

        A rank that has gone gets nothing; it is told to ``on_lost``.
        """
        for rank in self._others:
            self._post(rank, message)

    def close(self, patience_s: float = LEAVE_S) -> None:
        """Leaves in good order: the others are not told that this rank is lost.

        Args:
            patience_s: seconds to wait for the others to leave, too.
        """
        self._stop.set()
        self._watching.join(patience_s)
        self._transport.hang_up(patience_s)

    # What the transport has received -------------------------------------------------------------

    def put(self, source: int, tag: Tag, payload: Payload) -> None:
        """A sign of life, or a message."""
        self._others[source].silent_s = 0.0
        if (message := unpack(payload)) is not None:
            self._on_message(source, message)

    def lose(self, source: int, reason: str) -> None:
        """A rank has left, or is gone."""
        if reason == CLOSED:
            self._others[source].has_left = True
            return
        is_end = "closed by peer" in reason or "reset by peer" in reason
        self._lose(source, ENDED if is_end else f"{ENDED} ({reason})")

    # ---------------------------------------------------------------------------------------------

    def _post(self, rank: int, message: Any = None) -> None:
        # Whoever listens sees that the peer has gone.
        with self._sending, contextlib.suppress(RuntimeError):
            self._transport.send(pack_object(message), target=rank, tag=_TAG)

    def _watch(self) -> None:
        """Gives signs of life, and counts how long there was none.

        Only time counts in which this process itself was running: who was stopped together with
        the others, or slept with the machine, has missed nothing.
        """
        before = time.monotonic()
        while not self._stop.wait(BEAT_S):
            now = time.monotonic()
            passed_s, before = min(now - before, 2 * BEAT_S), now
            for rank, process in self._others.items():
                if not process.has_left and process.silent_s < SILENCE_S:  # else nobody takes them
                    self._post(rank)
                process.silent_s += passed_s
                state = process.state
                if state in ("X", "Z"):
                    self._lose(rank, ENDED)
                elif process.silent_s >= SILENCE_S and state in ("T", "t", None):
                    # It would outlive the run, whose end this thread may not survive.
                    if state is not None and process.parent in (os.getpid(), os.getppid()):
                        os.kill(process.pid, signal.SIGKILL)
                    self._lose(rank, SILENT)

    def _lose(self, rank: int, why: str) -> None:
        process = self._others[rank]
        if not (process.has_left or self._stop.is_set()):
            process.has_left = True
            self._on_lost(rank, f"(process {process.pid} on {process.host}) {why}")
