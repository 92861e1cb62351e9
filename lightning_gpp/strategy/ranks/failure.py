"""The first real error ends all ranks.

A rank that fails tells rank 0, which tells the others of the first failure: of one that was told,
or of a rank that is gone, frozen or cut off. Threads beside the main one hear of it within moments
and make every wait of the pipeline raise it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from lightning_gpp.runtime.processes.heartbeats import Heartbeats
from lightning_gpp.runtime.transport.transport import TransportError
from lightning_gpp.strategy.lightning_private import SIGTERMException
from lightning_gpp.strategy.ranks.pipelines import JoinedPipelines

log = logging.getLogger(__name__)

_GRACE_S = 3.0
"""For the first error to be told, when this rank saw only that another is gone."""

_TERMINATE_S = 10.0
"""For a step to end after SIGTERM; then the run ends without it."""

_STUCK_S = 8.0
"""After a failure elsewhere, for the main thread to come out of a collective of torch."""

_LEAVE_FAILED_S = 0.5
_FAILED = 1


class PeerError(RuntimeError):
    """Another rank failed first; the text holds its error and traceback."""


class RaisedError(PeerError):
    """User code of rank 0 raised while the others waited for it: what they share is in order."""


@dataclass(frozen=True, slots=True)
class _Report:
    """Why the run ends.

    Attributes:
        rank: that failed.
        summary: one line, in words that follow the rank.
        details: its traceback; empty where nobody could make one.
        pipeline: of the rank, where there are several.
    """

    rank: int
    summary: str
    details: str = ""
    pipeline: int | None = None

    @property
    def text(self) -> str:
        """In one line."""
        where = "" if self.pipeline is None else f"pipeline {self.pipeline}: "
        return f"{where}rank {self.rank} {self.summary}"

    def error(self) -> PeerError:
        text = self.text
        return PeerError(f"{text}\n\n{self.details}\n{text}" if self.details else text)


@dataclass(frozen=True, slots=True)
class Raised:
    """What rank 0 tells in the place of what its user code would have done next.

    Attributes:
        text: of the error.
    """

    text: str

    def error(self) -> RaisedError:
        """To be raised on the other ranks."""
        return RaisedError(self.text)


class EndOfDataError(StopIteration):
    """No failure: the data end on all ranks, inside of a step that reads them by itself."""


class FailureWatch:
    """Reports this rank's error to the others and hears of theirs.

    Args:
        host: address of rank 0.
        on_peer_failure: called from another thread with the error that ends the run, unless it is
            this rank's own.
        joined: this pipeline and those beside it; None if there is one.

    Attributes:
        terminated: which rank was asked to end (SIGTERM), as rank 0 knows; it ends all of them at
            the end of the step.
        ends_with_step: whether it does; the watch leaves that run alone.
    """

    def __init__(
        self,
        host: str,
        on_peer_failure: Callable[[PeerError], None],
        joined: JoinedPipelines | None = None,
    ) -> None:
        self._rank = dist.get_rank()
        self._joined = joined
        self._pipeline = None if joined is None else joined.peers.pipeline
        self._on_peer_failure = on_peer_failure
        self.terminated: int | None = None
        self.ends_with_step = False
        self._first: _Report | None = None
        self._known = threading.Event()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._ending = threading.Thread(target=self._end_if_stuck, name="failure-end", daemon=True)
        self._has_reported = False
        self._orderly: BaseException | None = None
        self._main = threading.get_ident()
        _show_peer_errors_short()
        self._heartbeats = Heartbeats(host, self._hear, self._lose)

    @property
    def has_failed(self) -> bool:
        """Whether this rank reported an error or saw one."""
        return self._has_reported

    def report(self, error: BaseException) -> None:
        """Tells the others of an error of this rank, unless it is one of theirs."""
        if self.is_in_order(error):
            return
        if self._has_reported or isinstance(error, PeerError):
            self._has_reported = True
            return
        self._has_reported = True
        self._tell(self._report_of(error))

    @property
    def can_end_in_order(self) -> bool:
        """Whether nothing has ended the run so far."""
        return not self._has_reported and self._first is None and self._orderly is None

    def is_in_order(self, error: BaseException) -> bool:
        """Whether the ranks are still together after this error, which ends the run."""
        if isinstance(error, SIGTERMException):
            return self.ends_with_step
        return error is self._orderly or isinstance(error, RaisedError)

    def end_in_order(self, error: Exception) -> Raised:
        """Rank 0: this error, of user code that the others wait for, ends the run.

        Returns:
            What they are to be told; the module can be made whole after it.
        """
        self._orderly = error
        report = self._report_of(error)
        self._tell_other_pipelines(report)
        return Raised(str(report.error()))

    def terminate(self) -> None:
        """This rank was asked to end (SIGTERM): all do at the end of the step, or soon."""
        if self._rank == 0:
            self._hear(0, {"terminated": 0})
        else:
            self._heartbeats.send({"terminated": self._rank})

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Reports errors of its body; errors that only echo another rank's become that one."""
        try:
            yield
        except EndOfDataError:
            raise
        except BaseException as error:
            first = self.origin(error)
            if first is None:
                raise
            raise first from None  # where this rank waited tells nothing

    def check(self) -> None:
        """Raises the error of another rank that ended the run."""
        first = self._first
        if first is not None and first.rank != self._rank:
            self._has_reported = True
            raise first.error()

    def origin(self, error: BaseException) -> PeerError | None:
        """Another rank's error if this one only echoes it; else reports this one.

        A rank whose peer dies sees a lost connection before or after it hears why.
        """
        if error is not self._orderly and _is_echo(error):
            self._known.wait(_GRACE_S)
            first = self._first
            if first is not None and first.rank != self._rank:
                self._has_reported = True
                return first.error()
            if first is None and (heard := self._heard_of_other_pipeline()) is not None:
                self._has_reported = True
                self._tell(heard)
                return heard.error()
        self.report(error)
        return None

    def _heard_of_other_pipeline(self) -> _Report | None:
        """Why this pipeline ends with another one, if it does."""
        text = None if self._joined is None else self._joined.heard_failure()
        if text is None:
            return None
        return _Report(self._rank, f"ends with another pipeline\n{text}", pipeline=self._pipeline)

    def _tell_other_pipelines(self, report: _Report) -> None:
        if self._joined is not None and self._rank == 0:
            self._joined.tell_failure(str(report.error()))

    def _report_of(self, error: BaseException) -> _Report:
        details = "".join(traceback.format_exception(error))
        summary = f"failed: {type(error).__name__}: {error}"
        return _Report(self._rank, summary, details, self._pipeline)

    def close(self) -> None:
        """Ends the watch in good order; a barrier before it lets all go together."""
        with self._lock:
            self._closed.set()
        if self._ending.ident is not None:
            self._ending.join()
        if self.has_failed:
            self._heartbeats.close(_LEAVE_FAILED_S)
        else:
            self._heartbeats.close()

    # In threads of the heartbeats ----------------------------------------------------------------

    def _hear(self, rank: int, message: dict[str, Any]) -> None:
        match message:
            case {"terminated": int(terminated)} if self._rank == 0:
                if self.terminated is None:
                    self.terminated = terminated
                    threading.Thread(
                        target=self._end_terminated, args=(terminated,), daemon=True
                    ).start()
            case {"rank": int(failed), "summary": str(summary), "details": str(details)}:
                self._settle(_Report(failed, summary, details, self._pipeline))
            case _:
                log.warning("rank %d: no message of a known kind: %s", rank, message)

    def _lose(self, rank: int, why: str) -> None:
        self._settle(_Report(rank, why, pipeline=self._pipeline))

    def _end_terminated(self, rank: int) -> None:
        if not self._closed.wait(_TERMINATE_S) and not self.ends_with_step:
            summary = f"was asked to end (SIGTERM), and no step ended within {_TERMINATE_S:g} s"
            self._settle(_Report(rank, summary, pipeline=self._pipeline), also_here=True)

    def _tell(self, report: _Report) -> None:
        """The way of an error of this rank: rank 0 decides which was the first."""
        if self._rank == 0:
            self._settle(report)
        else:
            self._heartbeats.send(asdict(report))

    def _settle(self, report: _Report, *, also_here: bool = False) -> None:
        """Takes a report for the first unless there was one; rank 0 passes it on."""
        with self._lock:
            if self._first is not None or self._closed.is_set():
                return
            self._first = report
            self._ending.start()
        self._known.set()
        if self._rank == 0:
            self._heartbeats.send(asdict(report))
            self._tell_other_pipelines(report)
        if self._rank == (1 if report.rank == 0 else 0):  # at once, and on one rank
            log.error("%s", report.text)
        if report.rank != self._rank or also_here:
            self._on_peer_failure(report.error())

    def _end_if_stuck(self) -> None:
        """Ends the process when its main thread never hears of the failure.

        A collective of gloo that waits for a rank which is frozen or cut off ends at the time
        limit of the process group, and nothing in this process can end it sooner.
        """
        while not self._closed.wait(_STUCK_S):
            if _is_in_collective(self._main):
                assert self._first is not None
                sys.stderr.write(
                    f"{self._first.error()}\nrank {self._rank} waits for it in a collective of "
                    "torch that cannot be interrupted, and ends\n"
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
    if isinstance(error, PeerError):
        return False
    text = str(error)
    return isinstance(error, TransportError | dist.DistError) or (
        isinstance(error, RuntimeError) and ("gloo" in text or "NCCL" in text)
    )


def _show_peer_errors_short() -> None:
    """Python shows an uncaught error of another rank without this rank's traceback.

    Rank 0 shows the other's, the rest one line each.
    """
    before = sys.excepthook
    if getattr(before, "shows_peer_errors_short", False):
        return

    def show(kind: type[BaseException], error: BaseException, place: TracebackType | None) -> None:
        if not isinstance(error, PeerError):
            before(kind, error, place)
        elif dist.is_initialized() and dist.get_rank() != 0:
            sys.stderr.write(f"rank {dist.get_rank()} ends: {str(error).splitlines()[0]}\n")
        else:
            sys.stderr.write(f"{error}\n")

    show.shows_peer_errors_short = True  # type: ignore[attr-defined]
    sys.excepthook = show
