"""A callback that writes the plan to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer

from lightning_gpp.planner.plan.plan import save_plan


class PlanFile(Callback):
    """Writes the plan of a run to ``path``, as JSON that ``GraphPipeStrategy(plan=path)`` reads.

    The strategy makes its plan when it meets the first batch; it is written right after that, so
    a run that is stopped has it too. With another strategy nothing is written.

    Args:
        path: the file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.is_written = False

    def on_validation_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Writes the plan, once: a sanity check may come before training, or no batch at all."""
        plan = getattr(trainer.strategy, "plan", None)
        if self.is_written or plan is None or not trainer.is_global_zero:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        save_plan(plan, self.path)
        self.is_written = True

    on_train_batch_end = on_fit_end = on_validation_batch_end
