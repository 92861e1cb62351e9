"""The time in which training steps run: that of this machine, unless devices are emulated."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Generic, TypeVar

from lightning_gpp.emulation.report import EmulationReport

_Work = TypeVar("_Work")


Resumption = tuple[float, float]
"""When emulated time goes on on all ranks by the clock as it is, and how far rank 0 had come, both
in emulated seconds; rank 0 tells it."""


class RealTime(Generic[_Work]):
    """What a run asks of emulated devices, as it is where devices are real: nothing happens."""

    time_scale: float | None = None
    """Real seconds that an emulated second takes; None where time is real."""

    def step(self, work: _Work, *, is_second: bool = False) -> AbstractContextManager[None]:
        """The body runs what trains, or one of its halves, at the pace of the devices.

        Args:
            work: that is run.
            is_second: whether its backward half runs, and its forward half is over.
        """
        return nullcontext()

    def window(self, since: int, resumption: Resumption | None) -> AbstractContextManager[None]:
        """The body runs a window of a pipeline that does not drain, likewise.

        Args:
            since: mini-batches that went backward since the pipeline was empty.
            resumption: rank 0's :meth:`resumption`.
        """
        return nullcontext()

    def resumption(self, since: int) -> Resumption | None:
        """Rank 0: how emulated time goes on before a window; None where it did not stand still.

        Args:
            since: mini-batches that went backward since the pipeline was empty.
        """
        return None

    def leave(self) -> None:
        """Something runs that takes no emulated time."""

    def report(self) -> EmulationReport | None:
        """All ranks: on rank 0 what emulated steps took; None elsewhere, or if there were none."""
        return None

    def close(self) -> None:
        """Gives back what the emulation needed."""
