"""Who has a channel when: the ranks of an emulation reserve channels in one file.

A message takes all of its channels for itself, from the first moment when it is ready and all of
them are free. Reservations are made in the order of the calls, and ranks make them when a message
is ready, so that the first to come is the first to be served. A sum over ranks is a *meeting*:
every rank says when it is ready, the last one reserves.

Every rank opens the same file with the same arguments; whoever is first makes it. Tables hold
numbers of eight bytes: when each channel is free, then for each set of ranks a ring of its
meetings. A row of the ring is the number of the meeting plus one, how many have come, when the
last of them was ready, and when it ends. One rank at a time works on the tables (``flock``).
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

NUM_MEETINGS = 4096
"""Sums that a set of ranks may have open at a time, in two steps together."""

_ROW = 4
_NUMBER, _NUM_RANKS, _READY, _END = range(_ROW)


class Meeting(NamedTuple):
    """A sum over ranks.

    Attributes:
        ranks: who takes part.
        number: how many sums these ranks have begun before.
    """

    ranks: tuple[int, ...]
    number: int


class SharedReservations:
    """The channels of a cluster between processes of one host; times are emulated seconds.

    Args:
        path: the file; in a folder of one host, on a file system in memory if there is one.
        channels: names of all channels.
        groups: all sets of ranks that sum.
        num_meetings: rows of each ring.
        timeout_s: limit of the wait for the tables.

    Raises:
        ValueError: the file was made with other arguments.
    """

    def __init__(
        self,
        path: str | Path,
        channels: Sequence[str],
        groups: Sequence[tuple[int, ...]] = (),
        *,
        num_meetings: int = NUM_MEETINGS,
        timeout_s: float = 60.0,
    ) -> None:
        self._channel = {name: index for index, name in enumerate(channels)}
        self._first_row = {
            ranks: len(channels) + index * num_meetings * _ROW for index, ranks in enumerate(groups)
        }
        self._num_meetings = num_meetings
        self._timeout_s = timeout_s
        num_bytes = 8 * max(1, len(channels) + len(groups) * num_meetings * _ROW)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        with self._alone():
            size = os.fstat(self._file).st_size
            if size == 0:
                os.ftruncate(self._file, num_bytes)
        if size not in (0, num_bytes):
            os.close(self._file)
            raise ValueError(
                f"{path} has {size} bytes, expected {num_bytes}: all ranks must name the same "
                "channels and groups, and each emulation needs a file of its own"
            )
        self._memory = mmap.mmap(self._file, num_bytes)
        self._table = memoryview(self._memory).cast("d")

    def reserve(self, channels: Sequence[str], ready_s: float, duration_s: float) -> float:
        """Takes channels for some time, all of them at once.

        Returns:
            When it starts: when it is ready and what was reserved before has left the channels.
        """
        with self._alone():
            return self._reserve(channels, ready_s, duration_s)

    def meet(
        self, meeting: Meeting, ready_s: float, channels: Sequence[str], duration_s: float
    ) -> None:
        """Says that a rank is ready for a sum; the last of its ranks reserves the channels.

        Raises:
            RuntimeError: so many sums are open that their rows are used up.
        """
        row = self._row(meeting)
        with self._alone():
            table, number = self._table, meeting.number + 1
            if table[row + _NUMBER] != number:
                if 0 < table[row + _NUM_RANKS] < len(meeting.ranks):
                    raise RuntimeError(
                        f"ranks {meeting.ranks} have more than {self._num_meetings} sums open; "
                        "raise num_meetings"
                    )
                table[row + _NUMBER], table[row + _NUM_RANKS], table[row + _READY] = number, 0, 0.0
            table[row + _NUM_RANKS] += 1
            table[row + _READY] = max(table[row + _READY], ready_s)
            if table[row + _NUM_RANKS] == len(meeting.ranks):
                start_s = self._reserve(channels, table[row + _READY], duration_s)
                table[row + _END] = start_s + duration_s

    def end_s(self, meeting: Meeting) -> float:
        """When a sum ends. Every rank asks once, after all of them have met."""
        row = self._row(meeting)
        with self._alone():
            found = self._table[row + _NUMBER], self._table[row + _NUM_RANKS]
            assert found == (meeting.number + 1, len(meeting.ranks)), f"{meeting}: {found}"
            return self._table[row + _END]

    def close(self) -> None:
        """Lets go of the file, which whoever chose its name removes."""
        self._table.release()
        self._memory.close()
        os.close(self._file)

    def _row(self, meeting: Meeting) -> int:
        return self._first_row[meeting.ranks] + meeting.number % self._num_meetings * _ROW

    def _reserve(self, channels: Sequence[str], ready_s: float, duration_s: float) -> float:
        places = [self._channel[name] for name in channels]
        start_s = max([ready_s, *(self._table[place] for place in places)])
        for place in places:
            self._table[place] = start_s + duration_s
        return start_s

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"the channels of the emulation were not free for {self._timeout_s:g} s: a "
                        "rank has stopped while it reserved one"
                    ) from None
                time.sleep(20e-6)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
