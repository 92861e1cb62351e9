"""The first real error ends all ranks.

A rank that fails writes its error to a store. A watcher thread on every rank reads it there and
makes every wait of the pipeline raise it, within a fraction of a second and without a collective.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from lightning_gpp.runtime.transport import TransportError

log = logging.getLogger(__name__)

_KEY = "first_error"
_POLL_S = 0.2
_GRACE_S = 1.0


class PeerError(RuntimeError):
    """Another rank failed first; the text holds its error and traceback."""


@dataclass(frozen=True, slots=True)
class _Report:
    rank: int
    summary: str
    details: str

    def error(self) -> PeerError:
        return PeerError(f"rank {self.rank} failed: {self.summary}\n\n{self.details}")


class FailureWatch:
    """Reports this rank's error to the others and watches for theirs.

    Args:
        host: address of rank 0.
        on_peer_failure: called from the watcher thread with the error of another rank.
    """

    def __init__(self, host: str, on_peer_failure: Callable[[PeerError], None]) -> None:
        self._rank = dist.get_rank()
        self._on_peer_failure = on_peer_failure
        self._stores = _connect(host)
        self._stop = threading.Event()
        self._has_reported = False
        self._thread = threading.Thread(target=self._watch, name="failure-watch", daemon=True)
        self._thread.start()

    @property
    def has_failed(self) -> bool:
        """Whether this rank reported an error or saw one."""
        return self._has_reported

    def report(self, error: BaseException) -> None:
        """Tells the others of an error of this rank, unless it is one of theirs."""
        if self._has_reported or isinstance(error, PeerError):
            self._has_reported = True
            return
        self._has_reported = True
        details = "".join(traceback.format_exception(error))
        report = _Report(self._rank, f"{type(error).__name__}: {error}", details)
        with contextlib.suppress(RuntimeError):  # the store's host may be the rank that has gone
            self._stores[0].compare_set(_KEY, "", pickle.dumps(report).hex())

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Reports errors of its body; errors that only echo another rank's become that one."""
        try:
            yield
        except BaseException as error:
            first = self.origin(error)
            if first is None:
                raise
            raise first from error

    def origin(self, error: BaseException) -> PeerError | None:
        """Another rank's error if this one only echoes it; else reports this one.

        A rank whose peer dies sees a lost connection. The dying rank has written its error before,
        or writes it within moments.
        """
        if _is_echo(error):
            if not self._has_reported:
                log.error("rank %d: %s", self._rank, error)  # a launcher may kill us any moment
            first = self._await_first()
            if first is not None and first.rank != self._rank:
                self._has_reported = True
                return first.error()
        self.report(error)
        return None

    def close(self) -> None:
        """Ends the watch in good order; a barrier before it keeps the store alive for all."""
        self._stop.set()
        self._thread.join()

    def _await_first(self) -> _Report | None:
        """The first report, for which a dying peer gets a moment."""
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline and not self._stop.is_set():
            if (report := self._read(self._stores[0])) is not None:
                return report
            time.sleep(_POLL_S / 4)
        return None

    def _read(self, store: Store) -> _Report | None:
        try:
            if store.check([_KEY]):
                report = pickle.loads(bytes.fromhex(store.get(_KEY).decode()))
                assert isinstance(report, _Report)
                return report
        except RuntimeError:  # the host of the store has gone; every further try would say so
            self._stop.set()
        return None

    def _watch(self) -> None:
        while not self._stop.wait(_POLL_S):
            report = self._read(self._stores[1])
            if report is not None:
                if report.rank != self._rank:
                    self._on_peer_failure(report.error())
                return


def _is_echo(error: BaseException) -> bool:
    """Whether an error is what a rank sees when another one is gone."""
    if isinstance(error, PeerError):
        return False
    text = str(error)
    return isinstance(error, TransportError | dist.DistError) or (
        isinstance(error, RuntimeError) and ("gloo" in text or "NCCL" in text)
    )


def _connect(host: str) -> list[Store]:
    """Two connections, one for each thread, to a store of rank 0's on a free port."""
    timeout = timedelta(seconds=60)
    is_master = dist.get_rank() == 0
    port: list[int | None] = [None]
    stores: list[Store] = []
    if is_master:
        server = TCPStore(host, 0, None, True, timeout, wait_for_workers=False)
        stores.append(server)
        port = [server.port]
    dist.broadcast_object_list(port, src=0)
    assert port[0] is not None
    while len(stores) < 2:
        stores.append(TCPStore(host, port[0], None, False, timeout, wait_for_workers=False))
    return stores
