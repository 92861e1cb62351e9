"""What ranks do in the tests of heartbeats."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
from typing import Any

import torch.distributed as dist

from lightning_gpp.runtime.processes import heartbeats

SILENCE_S = 2.0
LIMIT_S = 100.0


class Heard:
    """Heartbeats, by default with a limit that no load reaches, and what they said."""

    def __init__(self, silence_s: float = LIMIT_S) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.before = heartbeats.BEAT_S, heartbeats.SILENCE_S
        heartbeats.BEAT_S, heartbeats.SILENCE_S = 0.1, silence_s
        self.messages: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
        self.lost: queue.Queue[tuple[int, str]] = queue.Queue()
        self.beats = heartbeats.Heartbeats(
            lambda rank, message: self.messages.put((rank, message)),
            lambda rank, why: self.lost.put((rank, why)),
        )

    def end(self) -> list[tuple[int, str]]:
        """Leaves together with the others; who was lost."""
        dist.barrier()
        self.close()
        return list(self.lost.queue)

    def close(self) -> None:
        """Leaves."""
        self.beats.close()
        heartbeats.BEAT_S, heartbeats.SILENCE_S = self.before


def exchange() -> tuple[list[Any], list[Any]]:
    """Every rank sends; what came, and who was lost in spite of the good order."""
    heard = Heard()
    text = f"from {dist.get_rank()}: " + "é" * 100_000  # a long traceback
    heard.beats.send({"text": text})
    count = dist.get_world_size() - 1 if dist.get_rank() == 0 else 1
    found = sorted(
        (rank, message["text"][:8])
        for rank, message in (heard.messages.get(timeout=LIMIT_S) for _ in range(count))
    )
    return found, heard.end()


def stopped() -> tuple[int, str] | None:
    """Rank 1 is stopped, by which its process ends; rank 0 hears of it."""
    heard = Heard(SILENCE_S)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    try:
        return heard.lost.get(timeout=LIMIT_S)
    finally:
        heard.close()


def busy() -> list[tuple[int, str]]:
    """Rank 1 holds Python's lock for twice the limit; who was lost."""
    heard = Heard(SILENCE_S)
    if dist.get_rank() == 1:
        ctypes.PyDLL(None).usleep(int(2e6 * SILENCE_S))
    return heard.end()
