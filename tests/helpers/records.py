"""What a rank does in its training steps, action by action."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

from lightning_gpp.runtime.executor import Run
from lightning_gpp.runtime.run_state import ActionRecord
from lightning_gpp.schedule import Action


@contextmanager
def heard(on_record: Callable[[ActionRecord], object]) -> Iterator[None]:
    """While the body runs, every action of this process's training steps is told."""
    perform_all = Run.perform_all

    def performed(self: Run, actions: Sequence[Action]) -> None:
        own = self.executor.on_record

        def both(record: ActionRecord) -> None:
            on_record(record)
            if own is not None:
                own(record)

        self.executor.on_record = both if self.program.has_backward else own
        try:
            perform_all(self, actions)
        finally:
            self.executor.on_record = own

    with mock.patch.object(Run, "perform_all", performed):
        yield
