"""The tasks of a simulation, made from its times when somebody looks at them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import overload

from lightning_gpp.simulate.engine.times import Times
from lightning_gpp.simulate.simulation import Task


class Tasks(Sequence[Task]):
    """The tasks in the order of their starts.

    Args:
        times: when everything happened.
    """

    def __init__(self, times: Times) -> None:
        self._times = times

    def __len__(self) -> int:
        return len(self._slots)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            return [self._task(slot) for slot in self._slots[index]]
        return self._task(self._slots[index])

    @cached_property
    def _slots(self) -> list[int]:
        """The slots of tasks in the order of their starts."""
        start_s, end_s = self._times.trace.start_s, self._times.trace.end_s
        slots = [slot for slot in range(len(start_s)) if not self._is_hidden(slot)]
        slots.sort(key=lambda slot: (start_s[slot], end_s[slot]))
        return slots

    @cached_property
    def _index(self) -> dict[int, int]:
        return {slot: index for index, slot in enumerate(self._slots)}

    def _is_hidden(self, slot: int) -> bool:
        return self._times.shown(slot)[1].kind is None

    def _cause(self, slot: int) -> int | None:
        """The task whose end let a slot start; what waits alone, and tokens, are passed over."""
        cause = self._times.trace.cause[slot]
        while cause >= 0 and self._is_hidden(cause):
            cause = self._times.trace.cause[cause]
        return self._index[cause] if cause >= 0 else None

    def _task(self, slot: int) -> Task:
        found, (step, shown) = self._times.trace, self._times.shown(slot)
        assert shown.kind is not None  # it is not hidden
        is_item, device = slot < found.first_message, None
        if is_item:
            line = self._times.compiled.line(slot % len(self._times.compiled.items))
            device = line if line < self._times.compiled.num_devices else None
        return Task(
            shown.kind,
            found.start_s[slot],
            found.end_s[slot],
            device=device,
            channels=shown.channels,
            action=shown.action,
            size_bytes=shown.size_bytes,
            cause=self._cause(slot),
            step=step,
            ready_s=None if is_item else found.ready_s[slot],
        )
