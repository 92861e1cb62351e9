"""Calls that garbage collection lets go are told of, whenever that comes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import cast

from lightning_gpp.strategy.pipelined_run import PipelinedRun


class Collected(list[int]):
    """A list to which a call is added while somebody copies it."""

    late: Sequence[int] = (3,)

    def __iter__(self) -> Iterator[int]:
        yield from super().__iter__()
        self.extend(self.late)
        self.late = ()

    def pop(self, *args: int) -> int:
        found = super().pop(*args)
        self.extend(self.late)
        self.late = ()
        return found


def test_none_is_lost_that_comes_while_they_are_taken() -> None:
    run = cast("PipelinedRun", SimpleNamespace(dropped=Collected([1, 2])))
    taken = PipelinedRun._take_dropped(run) + PipelinedRun._take_dropped(run)
    assert sorted(taken) == [1, 2, 3]
    assert len(run.dropped) == 0
