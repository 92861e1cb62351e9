"""What our accelerators have in common."""

from __future__ import annotations

from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import Accelerator


class OurStrategy:
    """A strategy that trains on our accelerators."""


class OurAccelerator(Accelerator):
    """An accelerator for the graphpipe strategies only."""

    kind: ClassVar[str]
    """Its name in Lightning's registry."""

    expected: ClassVar[str]
    """What ``devices`` has to be."""

    def setup(self, trainer: pl.Trainer) -> None:
        """Refuses other strategies.

        Raises:
            TypeError: the strategy is none of ours; the text has the remedy.
        """
        if not isinstance(trainer.strategy, OurStrategy):
            raise TypeError(
                f'accelerator="{self.kind}" works with the graphpipe strategies only, not with '
                f'{type(trainer.strategy).__name__}: use Trainer(strategy="graphpipe"), or another '
                "accelerator"
            )

    @staticmethod
    def is_available() -> bool:
        """Every machine has a CPU."""
        return True

    @classmethod
    def name(cls) -> str:
        """Its name in Lightning's registry."""
        return cls.kind

    @classmethod
    def auto_device_count(cls) -> int:
        """There is no default number.

        Raises:
            ValueError: always; the text says what to give.
        """
        raise ValueError(f"{cls.expected}; got none")

    def setup_device(self, device: torch.device) -> None:
        """Nothing: a CPU needs none."""

    def get_device_stats(self, device: str | int | torch.device) -> dict[str, Any]:
        """Nothing: a CPU has no counters."""
        return {}

    def teardown(self) -> None:
        """Nothing."""
