"""Whether the user's loss is a mean over samples, which cutting into micro-batches relies on.

The losses of the micro-batches are weighted by their sizes and summed. That is the loss of the
whole mini-batch if it is a mean over samples; it is not for a sum, or for a loss that compares
samples with each other. A few samples tell, before training.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

MOST_CHECKED = 4
"""Samples on which a loss is tried, if there are as many."""

_RELATIVE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_COARSE_TOLERANCE = 5e-2


@dataclass(slots=True)
class LossProbe:
    """Calls the user's step and keeps its losses; an error makes the check inconclusive.

    Attributes:
        step: the user's step, bound to everything but the batch.
        losses: of the micro-batches of this run.
        means: of the losses of each run that has ended.
        tolerance: for comparing them, relative.
    """

    step: Callable[[Any], Any]
    losses: list[float] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    tolerance: float = _COARSE_TOLERANCE

    def __call__(self, batch: Any) -> Any:
        """Runs the step; what it raises after the pipelined forward is only noted."""
        try:
            result = self.step(batch)
            loss = result["loss"] if isinstance(result, Mapping) else result
            if isinstance(loss, Tensor):
                self.tolerance = _RELATIVE_TOLERANCE.get(loss.dtype, _COARSE_TOLERANCE)
            self.losses.append(float(loss))
        except Exception as error:  # the real step will raise it if it matters
            log.info("the loss could not be checked on a few samples: %s", error)
            self.losses.append(math.nan)
        return None

    def end_run(self) -> None:
        """Takes the mean of the losses of a run (equal sizes); starts anew."""
        self.means.append(sum(self.losses) / len(self.losses))
        self.losses = []

    @property
    def has_failed(self) -> bool:
        """Whether the step raised an error, or has no loss that is a number, in some run."""
        return not all(map(math.isfinite, self.means))


def mismatch(
    whole: float, again: float, halves: float, *, tolerance: float, num_samples: int
) -> str | None:
    """What to tell the user, or None when all is well or nothing can be said.

    Args:
        whole: loss of some samples in one piece.
        again: the same once more: differs if the step draws random numbers.
        halves: mean of the losses of their halves.
        tolerance: allowed difference, relative to ``whole``.
        num_samples: how many samples.

    >>> mismatch(2.0, 2.0, 2.0, tolerance=1e-6, num_samples=4)
    >>> mismatch(2.0, 2.1, 7.0, tolerance=1e-6, num_samples=4)  # random: cannot be told
    >>> "sum over samples" in mismatch(2.0, 2.0, 1.0, tolerance=1e-6, num_samples=4)
    True
    """

    def same(a: float, b: float) -> bool:
        return math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance * 1e-3)

    if not math.isfinite(whole + again + halves) or not same(whole, again) or same(whole, halves):
        return None
    what = "a sum over samples" if same(whole, 2 * halves) else "not a mean over samples"
    return (
        f"the loss of training_step is {what}: {num_samples} samples give {whole:.6g}, their "
        f"halves {halves:.6g} on average. Micro-batches then train on another loss than the whole "
        "batch does. Use a mean over samples (reduction='mean'), or num_microbatches=1."
    )
