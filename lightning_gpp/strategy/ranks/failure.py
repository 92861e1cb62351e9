"""The first error of any rank ends all ranks.

A rank that fails tells rank 0, which tells the others of the first failure: of one that was told,
or of a rank that is gone, frozen or cut off. Threads beside the main one hear of it within moments
and make every wait of the pipeline raise it. Ranks that are left meet once more
(:meth:`FailureWatch.meet`) and give each other what they hold of the module.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_gpp.runtime.processes.heartbeats import LEAVE_S, Heartbeats
from lightning_gpp.runtime.waits import TransportError, start_thread
from lightning_gpp.strategy.lightning_private import SIGTERMException
from lightning_gpp.strategy.ranks.short_traceback import shortened

log = logging.getLogger(__name__)

_GRACE_S = 3.0
"""For the first error to be told, when this rank saw only that another is gone."""

_LET_END_S = 1.0
"""After a failure of a rank that lives, for what other ranks are in the midst of."""

_MEET_S = 60.0
"""After a failure, for all ranks to come out of their work."""

_TERMINATE_S = 20.0
"""For a step to end after SIGTERM; then the run ends without it."""

_STUCK_S = 8.0
"""After a failure elsewhere, for the main thread to come out of a collective of torch."""

_LEAVE_FAILED_S = 0.5
_FAILED = 1


class PeerError(RuntimeError):
    """Another rank failed first; the text has its error and traceback."""


_MOST_PICKLED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Report:
    """Why the run ends.

    Attributes:
        rank: that failed.
        summary: one line, in words that follow the rank.
        details: its traceback; empty where nobody could make one.
        pickled: the error; empty where there is none, or it has no copy that says the same.
        is_interrupt: whether it is Ctrl-C, which ends other ranks as their own would.
    """

    rank: int
    summary: str
    details: str = ""
    pickled: bytes = b""
    is_interrupt: bool = False

    @classmethod
    def of(cls, error: BaseException, rank: int) -> _Report:
        """Of an error of this rank."""
        pickled = b""
        # To loops StopIteration is the end of data, and what is no Exception ends more than a run.
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            with contextlib.suppress(Exception):  # whatever it holds: ranks are told its text
                made = pickle.dumps(error)
                again = pickle.loads(made)
                is_same = (type(again), str(again)) == (type(error), str(error))
                pickled = made if is_same and len(made) <= _MOST_PICKLED_BYTES else b""
        trace, _ = shortened(error.__traceback__)
        details = "".join(traceback.format_exception(type(error), error, trace))
        return cls(rank, _summary(error), details, pickled, type(error) is KeyboardInterrupt)

    @property
    def text(self) -> str:
        """In one line."""
        return f"rank {self.rank} {self.summary}"

    @property
    def full_text(self) -> str:
        """With the traceback."""
        return f"{self.text}\n\n{self.details}\n{self.text}" if self.details else self.text

    def error(self) -> BaseException:
        """To be raised on other ranks: of the same type, so that scripts handle it alike."""
        error: BaseException = (
            KeyboardInterrupt() if self.is_interrupt else PeerError(self.full_text)
        )
        with contextlib.suppress(Exception):  # this process cannot make it, or there is none
            error = pickle.loads(self.pickled)
            add_note(error, f"rank {self.rank} failed:\n\n{self.details}")  # it has its own text
        error.__dict__["of_other_rank"] = self.full_text
        return error


def _summary(error: BaseException) -> str:
    return f"failed: {type(error).__name__}: {error}"


def add_note(error: BaseException, text: str) -> None:
    """Python from 3.11 on shows it below the error."""
    error.__dict__.setdefault("__notes__", []).append(text)


def of_other_rank(error: BaseException) -> str | None:
    """The text of an error that another rank had first; None for an own one."""
    text = vars(error).get("of_other_rank")
    return text if isinstance(text, str) else None


class FailureWatch:
    """Reports this rank's error to the other ranks, and receives theirs.

    Args:
        on_peer_failure: called from another thread with the error that ends the run, unless it is
            this rank's own.

    Attributes:
        terminated: which rank was asked to end (SIGTERM), as rank 0 knows; it ends all of them at
            the end of the step.
        ends_with_step: whether it does; the watch leaves that run alone.
        has_failed: whether this rank reported an error or saw one.
        rank: this one.
        first: the failure that ends the run; None before.
        has_said: whether this rank has printed what it was.
    """

    def __init__(self, on_peer_failure: Callable[[BaseException], None]) -> None:
        self.rank = dist.get_rank()
        self._on_peer_failure = on_peer_failure
        self.terminated: int | None = None
        self.ends_with_step = False
        self.first: _Report | None = None
        self._known = threading.Event()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._ending: threading.Thread | None = None
        self.has_failed = self.has_said = False
        self._ended = threading.Event()
        self._met = threading.Event()
        self._apart: str | None = None
        self._states: dict[int, Mapping[str, Any]] = {}
        self._main = threading.get_ident()
        self._heartbeats = Heartbeats(self._hear, self._lose)

    def report(self, error: BaseException) -> None:
        """Tells the others of an error of this rank, unless it is one of theirs."""
        if self.is_in_order(error):
            return
        is_known, self.has_failed = self.has_failed, True
        if not is_known and of_other_rank(error) is None:
            self._to_leader(_Report.of(error, self.rank))

    def is_own(self, error: BaseException) -> bool:
        """Whether it says more than the first one, if another rank had that."""
        if self.first is None or of_other_rank(error) is not None:
            return self.first is None
        return self.first.rank == self.rank or self.first.summary != _summary(error)

    def is_in_order(self, error: BaseException) -> bool:
        """Whether it ends the run of all ranks, which are still together, and is no failure."""
        return isinstance(error, SIGTERMException) and self.ends_with_step

    def meet(self, state: Mapping[str, Any]) -> str | None:
        """All ranks, after a failure: waits until the others have come out of their work.

        Args:
            state: what must be the same on all ranks for them to have one module.

        Returns:
            Why they do not have it; None if all are here.
        """
        self._ended.set()
        self._to_leader(("came", dict(state)))
        if not self._met.wait(_MEET_S):
            missing = sorted({*range(dist.get_world_size())} - {*self._states})
            who = f"ranks {missing}" if self.rank == 0 else "some ranks"
            self.part(f"{who} did not come out of their work within {_MEET_S:g} s")
        return self._apart

    def part(self, why: str) -> None:
        """The ranks will not have one module; all are told, and nobody waits for another."""
        with self._lock:
            is_known, self._apart = self._apart is not None, self._apart or why
        if is_known:
            return
        self._heartbeats.send(("apart", why))
        self._met.set()
        if self._ended.is_set():
            self._on_peer_failure(PeerError(why))

    def terminate(self) -> None:
        """This rank was asked to end (SIGTERM): all do at the end of the step, or soon."""
        self._to_leader(("terminated", self.rank))

    @contextlib.contextmanager
    def holding_interrupts(self) -> Iterator[None]:
        """Other ranks than 0: Ctrl-C is answered with rank 0, so that all end after one step.

        A terminal sends it to all of them. Where rank 0 does not end, or at the second time, it is
        answered as ever.
        """
        before = signal.getsignal(signal.SIGINT)
        is_main = threading.current_thread() is threading.main_thread()
        if self.rank == 0 or not is_main or before is not signal.default_int_handler:
            yield
            return

        def again() -> None:
            if not self._known.wait(_GRACE_S):
                os.kill(os.getpid(), signal.SIGINT)

        def hold(*_: object) -> None:
            signal.signal(signal.SIGINT, before)
            start_thread("interrupt", again)

        signal.signal(signal.SIGINT, hold)
        try:
            yield
        finally:
            if signal.getsignal(signal.SIGINT) is hold:
                signal.signal(signal.SIGINT, before)

    def _to_leader(self, message: Any) -> None:
        """Rank 0 decides what was first, and whether all are here."""
        if self.rank == 0:
            self._hear(0, message)
        else:
            self._heartbeats.send(message)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Reports errors of its body; errors that only echo another rank's become that one."""
        try:
            yield
        except BaseException as error:
            first = self.origin(error)
            if first is None:
                raise
            raise first from None  # where this rank waited tells nothing

    def check(self) -> None:
        """Raises the error of another rank that ended the run."""
        first = self.first
        if first is not None and first.rank != self.rank:
            self.has_failed = True
            raise first.error()

    def origin(self, error: BaseException) -> BaseException | None:
        """Another rank's error if this one only echoes it; else reports this one.

        A rank whose peer dies sees a lost connection before or after it hears why.
        """
        if _is_echo(error):
            self._known.wait(_GRACE_S)
            first = self.first
            if first is not None and first.rank != self.rank:
                self.has_failed = True
                return first.error()
        self.report(error)
        return None

    def close(self) -> None:
        """Ends the watch in good order; a barrier before it lets all go together."""
        with self._lock:
            self._closed.set()
        self._ended.set()
        if self._ending is not None:
            self._ending.join()
        self._heartbeats.close(_LEAVE_FAILED_S if self.has_failed else LEAVE_S)

    # In threads of the heartbeats ----------------------------------------------------------------

    def _hear(self, rank: int, message: Any) -> None:
        match message:
            case _Report():
                self._settle(message)
            case ("terminated", terminated):
                if self.terminated is None:
                    self.terminated = terminated
                    start_thread("sigterm", self._end_terminated, terminated)
            case ("came", state):
                self._come(rank, state)
            case ("met", _):
                self._met.set()
            case ("apart", why):
                self.part(why)

    def _lose(self, rank: int, why: str) -> None:
        report = _Report(rank, why)
        self._settle(report, lets_end=False)
        self.part(report.text)

    def _come(self, rank: int, state: Mapping[str, Any]) -> None:
        """Rank 0: a rank has come out of its work."""
        with self._lock:
            self._states[rank] = state
            states = [self._states[each] for each in sorted(self._states)]
        if len(states) < dist.get_world_size():
            return
        if any(each != states[0] for each in states):
            self.part(f"it came while ranks were at different updates of the weights: {states}")
        elif self._apart is None:
            self._heartbeats.send(("met", True))
            self._met.set()

    def _end_terminated(self, rank: int) -> None:
        if not self._closed.wait(_TERMINATE_S) and not self.ends_with_step:
            summary = f"was asked to end (SIGTERM), and no step ended within {_TERMINATE_S:g} s"
            self._settle(_Report(rank, summary), also_here=True, lets_end=False)

    def _settle(self, report: _Report, *, also_here: bool = False, lets_end: bool = True) -> None:
        """Takes a report for the first unless there was one; rank 0 passes it on.

        Args:
            report: of a failure.
            also_here: whether it ends this rank, if it is its own.
            lets_end: whether what other ranks are in the midst of may end before their waits do.
        """
        is_here = report.rank != self.rank or also_here
        delay_s = _LET_END_S if lets_end else 0.0
        with self._lock:
            if self.first is not None or self._closed.is_set():
                return
            self.first = report
            self._ending = start_thread("failure-end", self._end, report, is_here, delay_s)
        self._known.set()
        if self.rank == 0:
            self._heartbeats.send(report)
        if self.rank == (1 if report.rank == 0 else 0):  # at once, and on one rank
            self.has_said = True
            log.error("%s", report.text)

    def _end(self, report: _Report, is_here: bool, delay_s: float) -> None:
        """Ends the waits of the main thread, or the process when that never hears of the failure.

        A collective of gloo that waits for a rank which is frozen or cut off ends at the time
        limit of the process group, and nothing in this process can end it sooner.
        """
        if not self._ended.wait(delay_s) and is_here:
            self._on_peer_failure(report.error())
        while not self._ended.wait(_STUCK_S):
            if _is_in_collective(self._main):
                sys.stderr.write(
                    f"{report.full_text}\nrank {self.rank} waits for it in a collective of torch "
                    "that cannot be interrupted, and ends\n"
                )
                sys.stderr.flush()
                os._exit(_FAILED)


def _is_in_collective(thread: int) -> bool:
    """Whether a thread is inside of ``torch.distributed``."""
    frame = sys._current_frames().get(thread)
    folder = str(Path(dist.__file__).parent)
    return frame is not None and frame.f_code.co_filename.startswith(folder)


def _is_echo(error: BaseException) -> bool:
    """Whether an error is what a rank sees when another one is gone."""
    if of_other_rank(error) is not None:
        return False
    text = str(error)
    return isinstance(error, TransportError | dist.DistError) or (
        isinstance(error, RuntimeError) and ("gloo" in text or "NCCL" in text)
    )
