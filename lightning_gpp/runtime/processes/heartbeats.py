"""Ranks hear at once who has gone, and within seconds who is frozen or cut off.

Between rank 0 and every other rank messages go over a gloo group of their own, served by threads,
so that they tell of a rank whatever its main thread waits for and whatever else is on its way.
Connections are those of torch's rendezvous, which is trusted (``docs/trust.md``); messages are
JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gpp.runtime.processes.rank_devices import host_identity
from lightning_gpp.runtime.waits import reason, start_thread

BEAT_S = 1.0
"""Between two signs of life."""

SILENCE_S = 15.0
"""Without a sign of life a rank is taken for frozen or cut off."""

LEAVE_S = 5.0
"""Limit of waiting for the goodbye of the others."""

ENDED = "ended without a word: it was killed (out of memory?) or it crashed"
SILENT = f"gave no sign of life for {SILENCE_S:g} s: it is stopped or frozen, or the network is cut"

_BEAT, _GOODBYE = 0, -1
"""In the place of the size of a message that follows."""

_NO_LIMIT = timedelta(days=30)


@dataclass(frozen=True, slots=True)
class _Process:
    """The process of a rank."""

    pid: int
    parent: int
    host: str
    identity: str

    @classmethod
    def mine(cls) -> _Process:
        return cls(os.getpid(), os.getppid(), socket.gethostname(), host_identity())

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


@dataclass(slots=True, eq=False)
class _RankLine:
    """What goes between this rank and another one.

    Attributes:
        rank: the other one.
        process: of it.
        sent: the last messages for it, whose memory must live until they have left; there are fewer
            than these within the seconds of a silence.
        silent_s: seconds without a sign of life.
        has_left: whether nothing more is expected.
    """

    rank: int
    process: _Process
    sent: deque[tuple[Any, Tensor]] = field(default_factory=lambda: deque(maxlen=64))
    silent_s: float = 0.0
    has_left: bool = False


class Heartbeats:
    """This rank's lines: rank 0 has one to every other rank, the others one to rank 0.

    All ranks make theirs at the same time. The callbacks run in threads of this object.

    Args:
        on_message: called with a rank and what it sent.
        on_lost: called once with a rank that is gone and why, in words that follow "rank 3".
    """

    def __init__(
        self,
        on_message: Callable[[int, dict[str, Any]], None],
        on_lost: Callable[[int, str], None],
    ) -> None:
        self._on_message, self._on_lost = on_message, on_lost
        self._stop = threading.Event()
        self._group: Any = dist.new_group(backend="gloo", timeout=_NO_LIMIT)
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        found: list[Any] = [None] * num_ranks
        dist.all_gather_object(found, _Process.mine(), self._group)
        others = range(1, num_ranks) if rank == 0 else (0,)
        self._lines = [_RankLine(other, found[other]) for other in others]
        self._sending = threading.Lock()
        self._threads = [start_thread("heartbeats", self._read, line) for line in self._lines]
        self._watching = start_thread("heartbeats", self._watch)

    def send(self, message: dict[str, Any]) -> None:
        """Sends what JSON can hold: rank 0 to all others, the others to rank 0.

        A rank that has gone gets nothing; it is told to ``on_lost``.
        """
        text = json.dumps(message).encode()
        for line in self._lines:
            self._post(line, len(text), text)

    def close(self, patience_s: float = LEAVE_S) -> None:
        """Leaves in good order: the others are not told that this rank is lost.

        Args:
            patience_s: seconds to wait for the others to leave, too.
        """
        self._stop.set()
        deadline = time.monotonic() + patience_s
        for line in self._lines:
            self._post(line, _GOODBYE)
            self._threads.append(start_thread("heartbeats", self._leave, line))
        for thread in (*self._threads, self._watching):
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            dist.destroy_process_group(self._group)
            self._threads, self._group = [], None
            for line in self._lines:
                line.sent.clear()  # which hold the group, and its threads

    def _read(self, line: _RankLine) -> None:
        size = torch.zeros(1, dtype=torch.int64, device="cpu")
        try:
            while (num_bytes := self._received(size, line).item()) != _GOODBYE:
                line.silent_s = 0.0
                if num_bytes != _BEAT:
                    text = torch.empty(int(num_bytes), dtype=torch.uint8, device="cpu")
                    message = json.loads(self._received(text, line).numpy().tobytes())
                    self._on_message(line.rank, message)
            line.has_left = True
        except (RuntimeError, ValueError, TypeError) as error:
            is_end = "closed by peer" in str(error) or "reset by peer" in str(error)
            self._lose(line, ENDED if is_end else f"{ENDED} ({reason(error)})")

    def _received(self, tensor: Tensor, line: _RankLine) -> Tensor:
        self._group.recv([tensor], line.rank, 0).wait()
        return tensor

    def _post(self, line: _RankLine, size: int, text: bytes = b"") -> None:
        parts = [torch.tensor([size], device="cpu")]
        if text:
            parts.append(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        # Whoever reads sees that the peer has gone.
        with self._sending, contextlib.suppress(RuntimeError):
            for part in parts:
                line.sent.append((self._group.send([part], line.rank, 0), part))

    def _leave(self, line: _RankLine) -> None:
        """Waits until the goodbye has left."""
        with contextlib.suppress(RuntimeError):
            for work, _ in list(line.sent):
                work.wait()

    def _watch(self) -> None:
        """Gives signs of life, and counts how long there was none.

        Only time counts in which this process itself was running: who was stopped together with
        the others, or slept with the machine, has missed nothing.
        """
        before = time.monotonic()
        while not self._stop.wait(BEAT_S):
            now = time.monotonic()
            passed_s, before = min(now - before, 2 * BEAT_S), now
            for line in self._lines:
                if not line.has_left and line.silent_s < SILENCE_S:  # else nobody takes them
                    self._post(line, _BEAT)
                line.silent_s += passed_s
                state, process = line.process.state, line.process
                if state in ("X", "Z"):
                    self._lose(line, ENDED)
                elif line.silent_s >= SILENCE_S and state in ("T", "t", None):
                    # It would outlive the run, whose end this thread may not survive.
                    if state is not None and process.parent in (os.getpid(), os.getppid()):
                        os.kill(process.pid, signal.SIGKILL)
                    self._lose(line, SILENT)

    def _lose(self, line: _RankLine, why: str) -> None:
        if not (line.has_left or self._stop.is_set()):
            line.has_left = True
            where = f"(process {line.process.pid} on {line.process.host})"
            self._on_lost(line.rank, f"{where} {why}")
