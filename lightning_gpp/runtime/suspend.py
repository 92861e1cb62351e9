"""Calls that pause halfway and continue later.

The user's step calls the pipelined forward somewhere in its middle. Until the pipeline has an
answer, the step has to wait while other micro-batches are worked on. Each step runs in a thread of
its own; only one thread runs at any time, so user code never meets another thread.
"""

from __future__ import annotations

import contextvars
import queue
from collections.abc import Callable
from typing import Any

from lightning_gpp.runtime.waits import Background

_CLOSE_TIMEOUT_S = 5.0


class Abandoned(BaseException):
    """Ends the thread of a paused call that nobody will resume."""


_current: contextvars.ContextVar[SuspendedCall | None] = contextvars.ContextVar(
    "suspended_call", default=None
)


def running_call() -> SuspendedCall | None:
    """The suspended call that the caller runs in; None where there is none."""
    return _current.get()


class StepThreads:
    """A pool of threads for suspended calls; closed by :meth:`close`."""

    def __init__(self) -> None:
        self._all: list[Background] = []
        self._idle: list[Background] = []

    def run(self, task: Callable[[], None]) -> Background:
        """Runs a task in an idle thread, or in a new one; returns the thread for release."""
        if not self._idle:
            self._all.append(Background("step", stack_bytes=0))
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

    Attributes:
        is_paused: whether the last :meth:`start` or :meth:`resume` returned a question of the call,
            not its result.
    """

    def __init__(self, function: Callable[[], Any], threads: StepThreads) -> None:
        self._function, self._threads = function, threads
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        self.is_paused = False

    def start(self) -> Any:
        """Runs up to the first question or to the end; errors of the function are raised here."""
        context = contextvars.copy_context()
        self._thread = self._threads.run(lambda: context.run(self._main))
        return self._wait()

    def resume(self, answer: Any) -> Any:
        """Answers the question and runs on to the next one or to the end."""
        self._answers.put(answer)
        return self._wait()

    def abandon(self) -> None:
        """Ends a paused call without an answer."""
        while self.is_paused:
            self._answers.put(Abandoned())
            self._next()

    def ask(self, question: Any) -> Any:
        """Inside the call: pauses it, and returns the answer given to :meth:`resume`."""
        self._events.put((True, question))
        answer = self._answers.get()
        if isinstance(answer, Abandoned):
            raise answer
        return answer

    def _wait(self) -> Any:
        try:
            value = self._next()
        except BaseException:  # Ctrl-C: what the call asks later is answered with its end
            self._answers.put(Abandoned())
            raise
        if isinstance(value, BaseException):
            raise value
        return value

    def _next(self) -> Any:
        self.is_paused, value = self._events.get()
        if not self.is_paused:
            self._threads.release(self._thread)
        return value

    def _main(self) -> None:
        _current.set(self)
        try:
            value = self._function()
        except BaseException as error:  # handed to the thread that waits, which raises it
            value = error
        self._events.put((False, value))
