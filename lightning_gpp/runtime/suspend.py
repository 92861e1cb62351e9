"""Calls that stop half-way and go on later.

The user's step calls the pipelined forward somewhere in its middle. Until the pipeline has an
answer, the step has to wait while other micro-batches are worked on. Each step runs in a thread of
its own; only one thread runs at any time, so user code never meets another thread.
"""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Paused:
    """The call waits for an answer to this question."""

    question: Any


@dataclass(frozen=True, slots=True)
class Returned:
    """The call has ended with this value."""

    value: Any


@dataclass(frozen=True, slots=True)
class _Raised:
    error: BaseException


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


class SuspendedCall:
    """A function call that can pause.

    Args:
        function: called without arguments by :meth:`start`.
        threads: where it runs.
    """

    def __init__(self, function: Callable[[], Any], threads: StepThreads) -> None:
        self._function = function
        self._threads = threads
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[Paused | Returned | _Raised] = queue.SimpleQueue()
        self._is_paused = False

    def start(self) -> Paused | Returned:
        """Runs up to the first question or to the end; errors of the function are raised here."""
        context = contextvars.copy_context()
        self._tasks = self._threads.run(lambda: context.run(self._main))
        return self._wait()

    def resume(self, answer: Any) -> Paused | Returned:
        """Answers the question and runs on to the next one or to the end."""
        self._is_paused = False
        self._answers.put(answer)
        return self._wait()

    def abandon(self) -> None:
        """Ends a paused call without an answer."""
        if self._is_paused:
            self._is_paused = False
            self._answers.put(Abandoned())
            while isinstance(self._events.get(), Paused):
                self._answers.put(Abandoned())
            self._threads.release(self._tasks)

    def _wait(self) -> Paused | Returned:
        event = self._events.get()
        if not isinstance(event, Paused):
            self._threads.release(self._tasks)
        if isinstance(event, _Raised):
            raise event.error
        self._is_paused = isinstance(event, Paused)
        return event

    def _pause(self, question: Any) -> Any:
        self._events.put(Paused(question))
        answer = self._answers.get()
        if isinstance(answer, Abandoned):
            raise answer
        return answer

    def _main(self) -> None:
        _current.set(self)
        try:
            value = self._function()
        except BaseException as error:  # handed to the thread that waits, which raises it
            self._events.put(_Raised(error))
        else:
            self._events.put(Returned(value))


_Tasks = queue.SimpleQueue[Callable[[], None] | None]


class StepThreads:
    """Threads that run suspended calls, kept for the next ones until :meth:`close`."""

    def __init__(self) -> None:
        self._idle: list[_Tasks] = []
        self._threads: list[threading.Thread] = []

    def run(self, task: Callable[[], None]) -> _Tasks:
        """Runs a task in an idle thread, or in a new one; returns the thread for release."""
        if self._idle:
            tasks = self._idle.pop()
        else:
            tasks = queue.SimpleQueue()
            thread = threading.Thread(target=self._work, args=(tasks,), name="step", daemon=True)
            self._threads.append(thread)
            thread.start()
        tasks.put(task)
        return tasks

    def release(self, tasks: _Tasks) -> None:
        """Takes a thread back whose task is at its end."""
        self._idle.append(tasks)

    def close(self) -> None:
        """Ends the threads; no call may be running."""
        for tasks in self._idle:
            tasks.put(None)
        for thread in self._threads:
            thread.join(_CLOSE_TIMEOUT_S)
        self._idle, self._threads = [], []

    def _work(self, tasks: _Tasks) -> None:
        while (task := tasks.get()) is not None:
            task()
            del task  # while it waits for the next one: with it a mini-batch


_CLOSE_TIMEOUT_S = 5.0
