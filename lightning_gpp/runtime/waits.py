"""Waits for other ranks, all ended by the first error."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")


class TransportError(RuntimeError):
    """A message or collective failed; the text names what, with which rank, and why."""


def too_late(purpose: str, what: str, timeout_s: float) -> str:
    """The text of an error: what did not happen in time, and what it was for."""
    return (
        f"{purpose}: {what} within {timeout_s:g} s; raise `timeout` if the work before it can take "
        "longer"
    )


class Waits:
    """What a rank waits for in a run. Any thread may abort it.

    torch's own waits for gloo cannot be interrupted, so whoever waits sleeps here, and what it
    waits for wakes it.

    Attributes:
        on_abort: called by :meth:`abort`, too, from its thread.
    """

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self.on_abort: list[Callable[[], object]] = []

    def abort(self, error: BaseException) -> None:
        """Makes every wait, and every later one, raise ``error``; the first error stays."""
        self._error = self._error or error
        self.wake()
        for end in self.on_abort:
            end()

    def check(self) -> None:
        """Raises the error of :meth:`abort`, if there was one."""
        if self._error is not None:
            raise self._error

    def wake(self) -> None:
        """Something has come that may be waited for."""
        with self._changed:
            self._changed.notify_all()

    def until(self, find: Callable[[], _T | None], timeout_s: float) -> _T | None:
        """Waits until something is found; None if it was not in time.

        Raises:
            BaseException: the error of :meth:`abort`.
        """
        found: list[_T] = []

        def is_over() -> bool:
            if self._error is None and (result := find()) is not None:
                found.append(result)
            return bool(found) or self._error is not None

        with self._changed:
            self._changed.wait_for(is_over, timeout_s)
        self.check()
        return found[0] if found else None

    def sleep(self, seconds_s: float) -> None:
        """Lets time pass; raises the error of :meth:`abort`."""
        self.until(lambda: None, seconds_s)

    def done(self, future: Any, timeout_s: float, late: str) -> None:
        """Waits until a future of torch or of Python is done.

        Raises:
            TransportError: with the text ``late``: it is not in time.
            BaseException: the error of :meth:`abort`.
        """
        if not future.done():
            future.add_done_callback(lambda _: self.wake())
            if not self.until(lambda: future.done() or None, timeout_s):
                raise TransportError(late)
        self.check()


SMALL_STACK_BYTES = 1 << 20
"""Stack of a thread that only waits and runs no user code: stacks count towards memory limits."""

# threading.stack_size is a setting of the whole process; a handler of signals starts threads, too.
_stack_size = threading.RLock()


def start_thread(
    name: str, target: Callable[..., object], *args: Any, stack_bytes: int = SMALL_STACK_BYTES
) -> threading.Thread:
    """Starts a thread that ends with the process; ``stack_bytes=0`` is the system's default."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    # Debuggers leave such a thread running while they hold the others at a breakpoint.
    vars(thread).update(pydev_do_not_trace=True, is_pydev_daemon_thread=True)
    with _stack_size:
        before = threading.stack_size(stack_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread


class Background:
    """A daemon thread that runs one task after another.

    Args:
        name: of the thread.
        begin: what it does first.
        stack_bytes: see :func:`start_thread`.
    """

    def __init__(
        self,
        name: str,
        begin: Callable[[], object] = lambda: None,
        stack_bytes: int = SMALL_STACK_BYTES,
    ) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._name, self._begin, self._stack_bytes = name, begin, stack_bytes
        self._thread: threading.Thread | None = None

    def submit(self, do: Callable[[], _T]) -> Future[_T]:
        """Does something when it has done what was asked for before."""
        if self._thread is None:
            self._thread = start_thread(self._name, self._run, stack_bytes=self._stack_bytes)
        future: Future[_T] = Future()
        self._tasks.put(lambda: finish(future, do))
        return future

    def close(self, timeout_s: float) -> None:
        """Waits until all is done, or the time is over."""
        self._tasks.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        self._begin()
        while (task := self._tasks.get()) is not None:
            task()
            del task  # and what it holds, while it waits for the next one


def finish(future: Future[_T], do: Callable[[], _T]) -> Future[_T]:
    """Gives a future what a call returns or raises."""
    try:
        future.set_result(do())
    except Exception as error:  # whoever waits for it raises it
        future.set_exception(error)
    return future


def reason(error: BaseException) -> str:
    """The reason that torch gives for a failure, in one line."""
    return (str(error).strip().splitlines() or [""])[0]
