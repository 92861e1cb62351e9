"""Persistent worker processes that play the ranks of a job.

Starting a rank costs seconds (importing torch and Lightning), so the pool starts up to four
processes once per pytest session and runs one function after another on them. Each call gets
torchrun's environment variables, so that Lightning finds its processes already launched.

A call always ends: a rank that exceeds the time limit writes its Python stacks to a file and
exits (:func:`faulthandler.dump_traceback_later` does this from a thread that needs no GIL).
Ranks that died are started again for the next call.
"""

from __future__ import annotations

import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import MappingProxyType
from typing import Any

MAX_WORKERS = 4
START_LIMIT_S = 250.0
CALL_LIMIT_S = 250.0
KILL_GRACE_S = 5.0


@dataclass(frozen=True)
class Outcome:
    """How one rank's call ended.

    Attributes:
        rank: the rank.
        value: what the function returned.
        error_type: class name of the exception, None when there was none.
        error: text of the exception and of its causes.
        traceback: the rank's traceback, or the stacks of a rank that hung.
        exit_code: of a process that ended during the call (negative: killed by that signal).
        hung: whether the time limit ended it.
        elapsed_s: seconds that the function ran on this rank.
        output: what the rank wrote to stdout and stderr during the call.
        leaked: what the call left behind in the process (threads).
    """

    rank: int
    value: Any = None
    error_type: str | None = None
    error: str = ""
    traceback: str = ""
    exit_code: int | None = None
    hung: bool = False
    elapsed_s: float = 0.0
    output: str = ""
    leaked: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether the function did not return."""
        return self.error_type is not None or self.exit_code is not None or self.hung

    def describe(self) -> str:
        """A readable report of a failed rank."""
        if self.hung:
            head = f"rank {self.rank} hung; its stacks:"
        elif self.exit_code is not None:
            head = f"rank {self.rank} ended with exit code {self.exit_code}"
        else:
            head = f"rank {self.rank} raised after {self.elapsed_s:.1f} s:"
        tail = "\n".join(self.output.splitlines()[-40:])
        return f"{head}\n{self.traceback}\n--- output of rank {self.rank} (last lines) ---\n{tail}"


class WorkerError(AssertionError):
    """At least one rank failed; the text holds every failed rank's traceback and output."""


class _Worker:
    """One process and the pipe to it."""

    def __init__(self, index: int, folder: Path, environment: Mapping[str, str]) -> None:
        self.log = folder / f"worker_{index}.log"
        self.stacks = folder / f"worker_{index}.stacks"
        self.stacks.unlink(missing_ok=True)
        self.connection: Connection
        self.connection, child = Pipe()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    "from helpers.worker_process import main; main()",
                    str(child.fileno()),
                    str(self.stacks),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[child.fileno()],
                env=_worker_environment(environment),
                # Not in the checkout, which "-c" would put before the installed package.
                cwd=folder,
                start_new_session=True,
            )
        child.close()
        self.is_ready = False
        self.log_start = 0

    def wait_until_ready(self) -> None:
        if self.is_ready:
            return
        if not self.connection.poll(START_LIMIT_S):
            raise WorkerError(f"a worker did not start in {START_LIMIT_S} s:\n{self.output()}")
        try:
            self.connection.recv_bytes()
        except EOFError:
            raise WorkerError(f"a worker died while starting:\n{self.output()}") from None
        self.is_ready = True

    def output(self) -> str:
        data = self.log.read_bytes()[self.log_start :]
        return data.decode(errors="replace")

    def kill(self) -> None:
        """Ends the process and everything that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()


class WorkerPool:
    """Up to :data:`MAX_WORKERS` processes on which functions run as ranks.

    Args:
        environment: what the processes have in theirs, beside what this one has.
    """

    def __init__(self, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        self._environment = environment
        self._folder = tempfile.TemporaryDirectory(prefix="graphpipe_tests_")
        self._workers: dict[int, _Worker] = {}

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        num_ranks: int,
        limit_s: float = CALL_LIMIT_S,
        **kwargs: Any,
    ) -> list[Any]:
        """Runs ``function(*args, **kwargs)`` on every rank and returns the ranks' results.

        Raises:
            WorkerError: a rank raised, died, hung or left threads behind. Errors that only tell
                of another rank's come last in the text, otherwise the first in time comes first.
        """
        outcomes = self.outcomes(function, *args, num_ranks=num_ranks, limit_s=limit_s, **kwargs)
        failed = sorted(
            (outcome for outcome in outcomes if outcome.failed),
            key=lambda o: (o.hung, o.error_type == "PeerError", o.elapsed_s),
        )
        if failed:
            ranks = ", ".join(str(outcome.rank) for outcome in failed)
            hung = ", ".join(str(outcome.rank) for outcome in failed if outcome.hung)
            head = f"{function.__name__} failed on ranks {ranks} of {num_ranks}"
            if hung:
                head += f"; ranks {hung} hung for {limit_s:.0f} s"
            raise WorkerError("\n\n".join([head, *(outcome.describe() for outcome in failed)]))
        if leaked := {o.rank: o.leaked for o in outcomes if o.leaked}:
            raise WorkerError(f"{function.__name__} left threads behind (by rank): {leaked}")
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        function: Callable[..., Any],
        *args: Any,
        num_ranks: int,
        limit_s: float = CALL_LIMIT_S,
        **kwargs: Any,
    ) -> list[Outcome]:
        """Runs ``function`` as :meth:`run` does, and tells how each rank ended."""
        if not 1 <= num_ranks <= MAX_WORKERS:
            raise ValueError(f"num_ranks must be 1 to {MAX_WORKERS}, got {num_ranks}")
        call = (function, args, kwargs)
        try:
            workers = self._ready_workers(num_ranks)
            port = free_port()
            start = time.monotonic()
            for rank, worker in enumerate(workers):
                environment = rank_environment(rank, num_ranks, port)
                worker.log_start = worker.log.stat().st_size
                message = (sys.path, os.getcwd(), environment, limit_s, pickle.dumps(call))
                worker.connection.send_bytes(pickle.dumps(message))
            return self._collect(workers, start, limit_s + KILL_GRACE_S)
        except BaseException:
            self.close_workers()
            raise
        finally:
            self._restart_dead()

    def close(self) -> None:
        """Ends all workers and removes their files."""
        self.close_workers()
        self._folder.cleanup()

    def close_workers(self) -> None:
        """Ends all workers; the next call starts new ones."""
        for worker in self._workers.values():
            worker.kill()
        self._workers.clear()

    def _ready_workers(self, num_ranks: int) -> list[_Worker]:
        for index in range(num_ranks):
            if index not in self._workers:
                self._workers[index] = _Worker(index, Path(self._folder.name), self._environment)
        workers = [self._workers[index] for index in range(num_ranks)]
        for worker in workers:
            worker.wait_until_ready()
        return workers

    def _collect(self, workers: Sequence[_Worker], start: float, limit_s: float) -> list[Outcome]:
        pending = dict(enumerate(workers))
        outcomes: dict[int, Outcome] = {}
        while pending:
            remaining_s = start + limit_s - time.monotonic()
            ready = wait([worker.connection for worker in pending.values()], max(0.0, remaining_s))
            for rank, worker in list(pending.items()):
                if worker.connection in ready or remaining_s <= 0:
                    outcomes[rank] = self._outcome(rank, worker, time.monotonic() - start)
                    del pending[rank]
        return [outcomes[rank] for rank in sorted(outcomes)]

    def _outcome(self, rank: int, worker: _Worker, elapsed_s: float) -> Outcome:
        """Reads a rank's answer; a closed pipe or none at all means that it died or hung."""
        try:
            if worker.connection.poll():
                answer = pickle.loads(worker.connection.recv_bytes())
                return Outcome(rank, output=worker.output(), **answer)
        except (EOFError, ConnectionResetError):
            pass
        worker.is_ready = False
        try:
            exit_code = worker.process.wait(timeout=KILL_GRACE_S)
        except subprocess.TimeoutExpired:
            exit_code = None
        stacks = worker.stacks.read_text() if worker.stacks.exists() else ""
        return Outcome(
            rank,
            exit_code=None if stacks else exit_code,
            hung=bool(stacks) or exit_code is None,
            traceback=stacks,
            elapsed_s=elapsed_s,
            output=worker.output(),
        )

    def _restart_dead(self) -> None:
        """Replaces workers that ended, so that they import while the test goes on."""
        for index, worker in list(self._workers.items()):
            is_hung = worker.stacks.exists()
            if worker.is_ready or (worker.process.poll() is None and not is_hung):
                continue
            worker.kill()
            self._workers[index] = _Worker(index, Path(self._folder.name), self._environment)


def free_port() -> int:
    """A free TCP port of this host, below the ephemeral range, so that no connection takes it.

    It is above the ports that Lightning derives from the ids of SLURM jobs.
    """
    while True:
        port = random.SystemRandom().randrange(25_000, 32_768)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def rank_environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """The environment variables by which torchrun tells a process its rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "graphpipe-tests",
    }


def _worker_environment(further: Mapping[str, str]) -> dict[str, str]:
    left_out = ("PYTEST", "PL_GLOBAL_SEED")  # a test may have set a seed before the workers start
    environment = {
        key: value for key, value in os.environ.items() if not any(part in key for part in left_out)
    } | further
    path = [*further.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, path)))
    environment["OMP_NUM_THREADS"] = "1"
    environment["PYTHONUNBUFFERED"] = "1"
    return environment
