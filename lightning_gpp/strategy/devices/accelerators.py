"""What our accelerators have in common."""

from __future__ import annotations

from typing import Any, ClassVar

import lightning.pytorch as pl
from lightning.pytorch.accelerators import Accelerator


class OurStrategy:
    """A strategy that trains on our accelerators."""


class OurAccelerator(Accelerator):
    """An accelerator for the graphpipe strategies only."""

    kind: ClassVar[str]
    """Its name in Lightning's registry."""

    description: ClassVar[str]

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
    def register_accelerators(cls, accelerator_registry: Any) -> None:
        """Registers the accelerator under its name."""
        accelerator_registry.register(cls.kind, cls, description=cls.description)
