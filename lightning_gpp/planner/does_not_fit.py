"""That no plan fits into the devices' memory, and which schedule needs less of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_gpp.schedule import GPIPE, ONE_F_ONE_B

HOLDS_ALL = GPIPE.name
"""The schedule that is used where memory allows: stages hold all micro-batches of a mini-batch."""

HOLDS_FEW = ONE_F_ONE_B.name
"""The schedule whose stages hold as few micro-batches as a full pipeline needs."""

MEAN_OVER_SAMPLES = "it runs the step once per micro-batch: the loss must be a mean over samples"
"""What :data:`HOLDS_FEW` asks of the user."""

HOLD_FEWER = (
    f'schedule="{HOLDS_FEW}" would do (strategy.schedule={HOLDS_FEW} on the command line; '
    f"{MEAN_OVER_SAMPLES})"
)
"""The remedy where a plan fits with :data:`HOLDS_FEW` and not with :data:`HOLDS_ALL`."""


class DoesNotFitError(ValueError):
    """No plan of a planner fits into the devices' memory.

    What would help is sought when the text is asked for: it takes searches of its own, and nobody
    reads it where another question is asked instead.

    Args:
        text: the text, or what makes it.
    """

    def __init__(self, text: str | Callable[[], str]) -> None:
        super().__init__()
        self._text = text

    def __str__(self) -> str:
        if not isinstance(self._text, str):
            self._text = self._text()
        return self._text

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self),)
