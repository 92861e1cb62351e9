"""Ranks hear at once who has gone, and within seconds who is frozen or cut off.

Rank 0 has a connection to every other rank, apart from all others and served by threads of its
own, so that it tells of its rank whatever the rank's main thread waits for. Both sides prove that
they know a secret (:func:`multiprocessing.connection.deliver_challenge`) before anything is read,
and what is read is JSON, never pickled. The secret travels over torch's process group, whose
rendezvous is trusted (``docs/trust.md``).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from lightning_gpp.runtime.processes.heartbeat_connections import accept, connect
from lightning_gpp.runtime.processes.heartbeat_line import HeartbeatLine, start_thread
from lightning_gpp.runtime.processes.heartbeat_messages import hang_up
from lightning_gpp.runtime.processes.watched_rank import ProcessState, WatchedRank

BEAT_S = 1.0
"""Between two signs of life."""

SILENCE_S = 15.0
"""Without a sign of life a rank is taken for frozen or cut off."""

LEAVE_S = 5.0
"""Limit of waiting for the goodbye of the others."""

ENDED = "ended without a word: it was killed (out of memory?) or it crashed"
SILENT = f"gave no sign of life for {SILENCE_S:g} s: it is stopped or frozen, or the network is cut"

_BEAT: dict[str, Any] = {}
_GOODBYE = {"goodbye": True}


class Heartbeats:
    """This rank's connections: rank 0 has one to every other rank, the others one to rank 0.

    All ranks make theirs at the same time. The callbacks run in threads of this object.

    Args:
        host: address of rank 0 in torch's rendezvous; the listener is bound to it.
        on_message: called with a rank and what it sent.
        on_lost: called once with a rank that is gone and why, in words that follow "rank 3".

    Raises:
        TransportError: a rank did not connect in time.
    """

    def __init__(
        self,
        host: str,
        on_message: Callable[[int, dict[str, Any]], None],
        on_lost: Callable[[int, str], None],
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._stop = threading.Event()
        me = WatchedRank.mine()
        self._lines = {
            line.peer.rank: line for line in (accept(host, me) if me.rank == 0 else [connect(me)])
        }
        self._readers = [
            start_thread(f"heartbeats-of-{line.peer.rank}", self._read, line)
            for line in self._lines.values()
        ]
        self._beating = start_thread("heartbeats", self._beat)

    def send(self, message: dict[str, Any]) -> None:
        """Sends what JSON can hold: rank 0 to all others, the others to rank 0.

        A rank that has gone gets nothing; it is told to ``on_lost``.
        """
        for line in self._lines.values():
            line.send(message)

    def close(self, patience_s: float = LEAVE_S) -> None:
        """Leaves in good order: the others are not told that this rank is lost.

        Args:
            patience_s: seconds to wait for the others to leave, too.
        """
        self._stop.set()
        self.send(_GOODBYE)
        for line in self._lines.values():
            line.stop_sending()
        deadline = time.monotonic() + patience_s
        me = threading.current_thread()
        for thread in self._readers:
            if thread is not me:
                thread.join(max(0.0, deadline - time.monotonic()))
        for line in self._lines.values():
            hang_up(line.connection)
        for thread in (*self._readers, self._beating):
            if thread is not me:
                thread.join()
        for line in self._lines.values():
            line.connection.close()

    def _read(self, line: HeartbeatLine) -> None:
        try:
            while (message := line.receive()) != _GOODBYE:
                if message != _BEAT:
                    self._on_message(line.peer.rank, message)
            line.has_left = True
        except (OSError, EOFError, ValueError) as error:
            reason = "" if isinstance(error, EOFError | ConnectionResetError) else f" ({error})"
            self._lose(line, f"{ENDED}{reason}")

    def _beat(self) -> None:
        """Sends signs of life and counts how long there was none.

        Only time counts in which this process itself was running: who was stopped together with
        the others, or slept with the machine, has missed nothing.
        """
        before = time.monotonic()
        while not self._stop.wait(BEAT_S):
            now = time.monotonic()
            passed_s, before = min(now - before, 2 * BEAT_S), now
            for line in self._lines.values():
                line.send(_BEAT)
                line.silent_s += passed_s
                state = line.peer.state()
                if state is ProcessState.GONE:
                    self._lose(line, ENDED)
                elif line.silent_s >= SILENCE_S and state is not ProcessState.RUNNING:
                    # It would outlive the run, whose end this thread may not survive.
                    if state is ProcessState.STOPPED and line.peer.was_started_for_run:
                        os.kill(line.peer.pid, signal.SIGKILL)
                    self._lose(line, SILENT)

    def _lose(self, line: HeartbeatLine, why: str) -> None:
        if not (line.has_left or self._stop.is_set()):
            line.has_left = True
            self._on_lost(line.peer.rank, f"{line.peer.where} {why}")
