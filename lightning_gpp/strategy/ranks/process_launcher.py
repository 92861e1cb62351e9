"""Lightning's launcher of processes, without its ways to wait for ever."""

from __future__ import annotations

import signal
import sys
from typing import Any

import lightning.pytorch as pl

from lightning_gpp.runtime.processes.rank_processes import end_with_starter, ended_after_error
from lightning_gpp.strategy.lightning_private import MultiProcessingLauncher, SIGTERMException
from lightning_gpp.strategy.ranks.failure import of_other_rank
from lightning_gpp.strategy.ranks.handed_back import handed_back, take_back
from lightning_gpp.strategy.report import show

INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM
"""Exit codes of a rank that was interrupted or asked to end, as shells have them."""


class ProcessLauncher(MultiProcessingLauncher):
    """Starts the ranks by ``spawn``, ``fork`` or ``forkserver``; none outlives the job."""

    def launch(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a function on all ranks and returns what it returns on rank 0."""
        if self._start_method != "fork":  # each imports torch and Lightning, for seconds
            show(f"Starting {self._our_strategy.num_processes} processes ...")
        with ended_after_error():
            return super().launch(*args, **kwargs)

    def _collect_rank_zero_results(self, trainer: pl.Trainer, results: Any) -> Any:
        """What the first rank of a host hands back; weights only where they are all there.

        On other hosts than that of rank 0 those of other stages are missing; with
        ``tensors="shape_only"`` none has values.
        """
        output = super()._collect_rank_zero_results(trainer, results)
        has_weights = self._strategy.global_rank == 0
        has_weights &= not getattr(self._strategy, "is_shape_only", False)
        if output is None or has_weights:
            return output
        if output.weights_path is not None:
            self._strategy.checkpoint_io.remove_checkpoint(output.weights_path)
        return output._replace(weights_path=None)

    def get_extra_results(self, trainer: pl.Trainer) -> dict[str, Any]:
        """What rank 0 sends beside weights: how far training came, and the plan that was shown."""
        shown = self._our_strategy.reports.shown_plan
        own = {"handed_back": handed_back(trainer), "shown_plan": shown}
        return super().get_extra_results(trainer) | own

    def update_main_process_results(self, trainer: pl.Trainer, extra: dict[str, Any]) -> None:
        """Takes it over in the starting process, from which the next loop's ranks are started."""
        super().update_main_process_results(trainer, extra)
        take_back(trainer, extra["handed_back"])
        self._our_strategy.reports.shown_plan = extra["shown_plan"]

    @property
    def _our_strategy(self) -> Any:
        return self._strategy

    def _wrapping_function(self, *args: Any, **kwargs: Any) -> None:
        """A rank. One that ends early must not end with 0: its starter would wait for a result.

        Raises:
            RuntimeError: user code ended the process as if all was well.
        """
        end_with_starter()
        try:
            super()._wrapping_function(*args, **kwargs)
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
        except SIGTERMException:
            sys.exit(TERMINATED)
        except Exception as error:
            if of_other_rank(error) is not None:
                raise error.with_traceback(None) from None  # without the way that led to it here
            raise
        except SystemExit as error:
            if error.code in (None, 0):
                raise RuntimeError(
                    "sys.exit() was called on this rank before the run had ended. To stop early, "
                    "set trainer.should_stop = True"
                ) from error
            raise
