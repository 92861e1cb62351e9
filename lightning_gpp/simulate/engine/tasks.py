"""The tasks of a simulation, made from its times when somebody looks at them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import overload

from lightning_gpp.schedule import Action, Program
from lightning_gpp.simulate.engine.compiled import KINDS, NO_TASK, Compiled
from lightning_gpp.simulate.engine.times import NEVER, Times
from lightning_gpp.simulate.program_costs import ProgramCosts
from lightning_gpp.simulate.simulation import Task, TaskKind


class Tasks(Sequence[Task]):
    """The tasks in the order of their starts.

    Args:
        program: what was played.
        costs: with these costs.
        compiled: as numbers.
        times: when.
    """

    def __init__(
        self, program: Program, costs: ProgramCosts, compiled: Compiled, times: Times
    ) -> None:
        self._program, self._costs = program, costs
        self._compiled, self._times = compiled, times

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
        times = self._times
        start_s, end_s = times.start_s, times.end_s
        slots = [slot for slot, at_s in enumerate(start_s) if at_s != NEVER]
        if any(kind == NO_TASK for kind in self._compiled.transfers.kinds):
            slots = [slot for slot in slots if self._kind(slot) != NO_TASK]
        slots.sort(key=lambda slot: (start_s[slot], end_s[slot]))
        return slots

    @cached_property
    def _index(self) -> dict[int, int]:
        return {slot: index for index, slot in enumerate(self._slots)}

    def _kind(self, slot: int) -> int:
        times = self._times
        if slot < times.first_transfer:
            return self._compiled.operations.kinds[slot % times.num_operations]
        number = (slot - times.first_transfer) % times.num_transfers
        return self._compiled.transfers.kinds[number]

    def _cause(self, slot: int) -> int | None:
        """The task whose end let a slot start; tokens between streams are passed over."""
        cause = self._times.cause[slot]
        while cause >= 0 and self._kind(cause) == NO_TASK:
            cause = self._times.cause[cause]
        return self._index[cause] if cause >= 0 else None

    def _task(self, slot: int) -> Task:
        if slot < self._times.first_transfer:
            return self._operation_task(slot)
        return self._transfer_task(slot)

    def _operation_task(self, slot: int) -> Task:
        step, position = divmod(slot, self._times.num_operations)
        operations = self._compiled.operations
        stream = self._compiled.stream(position)
        is_device = stream < self._compiled.num_devices
        number = operations.actions[position]
        kind = KINDS[operations.kinds[position]]
        return Task(
            kind,
            self._times.start_s[slot],
            self._times.end_s[slot],
            device=stream if is_device else None,
            channels=self._input_channel(kind),
            action=self._program.actions[stream][number] if number >= 0 else None,
            size_bytes=self._costs.step.input_bytes if kind is TaskKind.COPY else None,
            cause=self._cause(slot),
            step=step,
        )

    def _action(self, operation: int) -> Action:
        stream = self._compiled.stream(operation)
        return self._program.actions[stream][self._compiled.operations.actions[operation]]

    def _input_channel(self, kind: TaskKind) -> tuple[str, ...]:
        """Reading occupies the host, copying its link to the device."""
        if kind not in (TaskKind.DATA, TaskKind.COPY):
            return ()
        device = self._costs.cluster.devices[self._program.devices[-1]]
        return (f"{device.name} {'host' if kind is TaskKind.DATA else 'copy'}",)

    def _transfer_task(self, slot: int) -> Task:
        times, transfers = self._times, self._compiled.transfers
        step, number = divmod(slot - times.first_transfer, times.num_transfers)
        sender = transfers.senders[number]
        return Task(
            KINDS[transfers.kinds[number]],
            times.start_s[slot],
            times.end_s[slot],
            channels=tuple(self._compiled.channels[c] for c in transfers.channels[number]),
            action=self._action(sender) if sender >= 0 else None,
            size_bytes=transfers.size_bytes[number],
            cause=self._cause(slot),
            step=step,
            ready_s=times.ready_s[slot - times.first_transfer],
        )
