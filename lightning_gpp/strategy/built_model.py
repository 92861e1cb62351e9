"""What user code's leaders and followers ask of a model that is built, however it is divided."""

from __future__ import annotations

from typing import Any, Protocol

from lightning_gpp.emulation.real_time import RealTime
from lightning_gpp.strategy.state.partition import Partition


class BuiltModel(Protocol):
    """A model divided over the ranks, as one rank has it."""

    @property
    def partition(self) -> Partition:
        """Which rank holds which parameters."""

    @property
    def time(self) -> RealTime[Any]:
        """In which its steps run."""

    def close(self) -> None:
        """All ranks: gives back what the model needed of the processes."""
