"""The default clock of training steps: real devices need no pacing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from lightning_gpp.emulation.report import EmulationReport
from lightning_gpp.schedule import Program


class RealTime:
    """Stands in for an emulation where devices are real: does nothing."""

    time_scale: float | None = None
    """Real seconds that an emulated second takes; None where time is real."""

    def step(self, program: Program, *, is_second: bool = False) -> AbstractContextManager[None]:
        """The body runs a training program, or one of its halves, at the pace of the devices.

        Args:
            program: that is run.
            is_second: whether its backward half runs, and its forward half is over.
        """
        return nullcontext()

    def report(self) -> EmulationReport | None:
        """All ranks: on rank 0 what emulated steps took; None elsewhere, or if there were none."""
        return None

    def close(self) -> None:
        """Gives back what the emulation needed."""
