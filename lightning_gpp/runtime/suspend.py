"""Calls that stop half-way and go on later.

The user's step calls the pipelined forward somewhere in its middle. Until the pipeline has an
answer, the step has to wait while other micro-batches are worked on. Each step runs in a thread of
its own; only one thread runs at any time, so user code never meets another thread.
"""

from __future__ import annotations

import contextvars
import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_gpp.runtime.waits import Background

_CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Paused:
    """The call waits for an answer to this question."""

    question: Any


@dataclass(frozen=True, slots=True)
class Returned:
    """The call has ended with this value."""

    value: Any


class Abandoned(BaseException):
    """Raised inside a paused call that will not be resumed, so that its thread ends."""


_current: contextvars.ContextVar[SuspendedCall | None] = contextvars.ContextVar(
    "suspended_call", default=None
)


def ask(question: Any) -> Any:
    """Pauses the suspended call that is running and returns the answer given to ``resume``.

    Raises:
        RuntimeError: not inside a suspended call.
    """
    call = _current.get()
    if call is None:
        raise RuntimeError("ask() works only inside a SuspendedCall")
    return call._pause(question)


def in_suspended_call() -> bool:
    """Whether the caller runs inside a suspended call."""
    return _current.get() is not None


class StepThreads:
    """Threads that run suspended calls, kept for the next ones until :meth:`close`."""

    def __init__(self) -> None:
        self._all: list[Background] = []
        self._idle: list[Background] = []

    def run(self, task: Callable[[], None]) -> Background:
        """Runs a task in an idle thread, or in a new one; returns the thread for release."""
        if not self._idle:
            self._all.append(Background("step"))
            self._idle.append(self._all[-1])
        thread = self._idle.pop()
        thread.submit(task)
        return thread

    def release(self, thread: Background) -> None:
        """Takes a thread back whose task is at its end."""
        self._idle.append(thread)

    def close(self) -> None:
        """Ends the threads; what still runs in one, after an error, ends with the process."""
        for thread in self._all:
            thread.close(_CLOSE_TIMEOUT_S)
        self._all, self._idle = [], []


class SuspendedCall:
    """A function call that can pause.

    Args:
        function: called without arguments by :meth:`start`.
        threads: where it runs.
    """

    def __init__(self, function: Callable[[], Any], threads: StepThreads) -> None:
        self._function, self._threads = function, threads
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[Paused | Returned | BaseException] = queue.SimpleQueue()
        self._is_paused = False

    def start(self) -> Paused | Returned:
        """Runs up to the first question or to the end; errors of the function are raised here."""
        context = contextvars.copy_context()
        self._thread = self._threads.run(lambda: context.run(self._main))
        return self._wait()

    def resume(self, answer: Any) -> Paused | Returned:
        """Answers the question and runs on to the next one or to the end."""
        self._answers.put(answer)
        return self._wait()

    def abandon(self) -> None:
        """Ends a paused call without an answer."""
        while self._is_paused:
            self._answers.put(Abandoned())
            self._note(self._events.get())

    def _wait(self) -> Paused | Returned:
        try:
            event = self._events.get()
        except BaseException:  # Ctrl-C: what the call asks later is answered with its end
            self._answers.put(Abandoned())
            raise
        self._note(event)
        if isinstance(event, BaseException):
            raise event
        return event

    def _note(self, event: Paused | Returned | BaseException) -> None:
        self._is_paused = isinstance(event, Paused)
        if not self._is_paused:
            self._threads.release(self._thread)

    def _pause(self, question: Any) -> Any:
        self._events.put(Paused(question))
        answer = self._answers.get()
        if isinstance(answer, Abandoned):
            raise answer
        return answer

    def _main(self) -> None:
        _current.set(self)
        try:
            event: Returned | BaseException = Returned(self._function())
        except BaseException as error:  # handed to the thread that waits, which raises it
            event = error
        self._events.put(event)
