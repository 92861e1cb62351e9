"""Waits for operations of ``torch.distributed`` that an error of another rank can end.

torch's own wait for an operation of gloo cannot be interrupted. So who waits sleeps on an event,
which the operation sets when it is done, and :meth:`WorkWaits.abort` before.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_gpp.runtime.transport.transport import TransportError

_T = TypeVar("_T")


class WorkWaits:
    """All waits of one kind on this rank. Any thread may abort them."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._waiting: set[threading.Event] = set()

    def abort(self, error: BaseException) -> None:
        """Makes every wait, and every later one, raise ``error``; the first error stays."""
        self._error = self._error or error
        for woken in tuple(self._waiting):
            woken.set()

    def check(self) -> None:
        """Raises the error of :meth:`abort`, if there was one."""
        if self._error is not None:
            raise self._error

    def wait(
        self,
        work: dist.Work,
        timeout_s: float,
        *,
        late: TransportError,
        failed: str,
        is_on_host: bool = True,
    ) -> None:
        """Waits for an operation.

        Args:
            work: the operation.
            timeout_s: seconds after which to give up.
            late: the error of giving up.
            failed: the text of its error, before torch's reason.
            is_on_host: whether this rank waits, and not the stream of a GPU, whose limit is that of
                the process group.

        Raises:
            TransportError: it did not end in time, or it failed, as another rank has gone.
            BaseException: the error of :meth:`abort`.
        """
        if is_on_host and not self._is_done_within(timeout_s, work.get_future()):
            raise late
        self.check()
        try:
            work.wait()
        except RuntimeError as error:
            raise _failure(failed, error) from error

    def result(
        self, future: Future[_T], timeout_s: float, *, late: TransportError, failed: str
    ) -> _T:
        """Waits for what another thread begins; arguments and errors as of :meth:`wait`."""
        if not future.done() and not self._is_done_within(timeout_s, future):
            raise late
        self.check()
        try:
            return future.result()
        except RuntimeError as error:
            raise _failure(failed, error) from error

    def _is_done_within(self, timeout_s: float, future: Any) -> bool:
        woken = threading.Event()
        self._waiting.add(woken)
        future.add_done_callback(lambda _: woken.set())
        if self._error is not None:
            woken.set()
        in_time = woken.wait(timeout_s)
        self._waiting.discard(woken)
        return in_time


def _failure(failed: str, error: RuntimeError) -> TransportError:
    return TransportError(f"{failed} ({str(error).strip().splitlines()[0]})")
