"""Lightning's launcher of processes, without its ways to wait for ever; SIGTERM to any rank."""

from __future__ import annotations

import signal
import sys
from typing import Any

from lightning_gpp.runtime.processes.rank_processes import end_with_starter, ended_after_error
from lightning_gpp.strategy.lightning_private import (
    MultiProcessingLauncher,
    SIGTERMException,
)
from lightning_gpp.strategy.ranks.failure import of_other_rank
from lightning_gpp.strategy.report import show

INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM
"""Exit codes of a rank that was interrupted or asked to end, as shells have them."""


class ProcessLauncher(MultiProcessingLauncher):
    """Starts the ranks by ``spawn``, ``fork`` or ``forkserver``; none outlives the job."""

    def launch(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a function on all ranks and returns what it returns on rank 0."""
        if self._start_method != "fork":  # each imports torch and Lightning, for seconds
            show("Starting the processes ...")
        with ended_after_error():
            return super().launch(*args, **kwargs)

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
