"""What user code's leaders and followers ask of a model that is built, however it is divided."""

from __future__ import annotations

from typing import Protocol

from lightning_gpp.strategy.emulation.emulation_report import EmulationReport
from lightning_gpp.strategy.state.partition import Partition


class BuiltModel(Protocol):
    """A model divided over the ranks, as one rank has it."""

    @property
    def partition(self) -> Partition:
        """Which rank holds which parameters."""

    def leave_emulated_time(self) -> None:
        """Something runs that takes no emulated time."""

    def emulation_report(self) -> EmulationReport | None:
        """All ranks: on rank 0 what emulated steps took; None elsewhere, or if there were none."""

    def abort(self, error: BaseException) -> None:
        """Ends every wait of this rank with an error."""

    def close(self) -> None:
        """All ranks: gives back what the model needed of the processes."""
