"""A rank at the other end of a connection: who it is, and what is seen of its process."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from dataclasses import asdict, dataclass
from enum import Enum, auto
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path

import torch.distributed as dist

from lightning_gpp.runtime.processes.heartbeat_messages import CONNECT_S, receive
from lightning_gpp.runtime.processes.rank_sockets import host_identity

_PROCESSES = Path("/proc")


class ProcessState(Enum):
    """What is seen of a process of this host."""

    RUNNING = auto()
    STOPPED = auto()
    GONE = auto()
    UNSEEN = auto()


@dataclass(frozen=True, slots=True)
class WatchedRank:
    """A rank at the other end.

    Attributes:
        rank: of the peer.
        pid: of its process.
        parent: of the process that started it.
        host: its name.
        identity: of the host and its process numbers, see :func:`_identity`.
    """

    rank: int
    pid: int
    parent: int
    host: str
    identity: str

    @classmethod
    def mine(cls) -> WatchedRank:
        """This rank."""
        return cls(dist.get_rank(), os.getpid(), os.getppid(), socket.gethostname(), _identity())

    def greet(self, connection: Connection) -> WatchedRank:
        """Tells the other end who this is; who that is.

        Raises:
            ValueError: it said something else.
        """
        connection.send_bytes(json.dumps(asdict(self)).encode())
        if not connection.poll(CONNECT_S):
            raise TimeoutError(f"no greeting within {CONNECT_S:g} s")
        match receive(connection):
            case {
                "rank": int(rank),
                "pid": int(pid),
                "parent": int(parent),
                "host": str(host),
                "identity": str(identity),
            }:
                return WatchedRank(rank, pid, parent, host, identity)
            case other:
                raise ValueError(f"a greeting was expected, got {other}")

    @property
    def where(self) -> str:
        """Its process and host, for people."""
        return f"(process {self.pid} on {self.host})"

    @property
    def was_started_for_run(self) -> bool:
        """Whether this process, or the one that started this one, started it."""
        return self.parent in (os.getpid(), os.getppid())

    def state(self) -> ProcessState:
        """A silent process that runs holds Python's lock in a long call (pickling gigabytes)."""
        if self.identity != _identity() or not _PROCESSES.is_dir():
            return ProcessState.UNSEEN
        try:
            status = (_PROCESSES / str(self.pid) / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return ProcessState.GONE
        except OSError:
            return ProcessState.UNSEEN
        letter = status.rpartition(")")[2].split()[0]
        return {"Z": ProcessState.GONE, "X": ProcessState.GONE, "T": ProcessState.STOPPED}.get(
            letter, ProcessState.RUNNING
        )


@cache
def _identity() -> str:
    """What tells the host and its process numbers from others."""
    with contextlib.suppress(OSError):
        return f"{host_identity()} {Path('/proc/self/ns/pid').readlink()}"
    return host_identity()
