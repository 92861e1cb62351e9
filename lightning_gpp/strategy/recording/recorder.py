"""Records on this rank what one optimizer step consists of, while it is asked to.

Or several steps in a row, where the pipeline does not drain between them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from lightning_gpp.common.torch_device import synchronize
from lightning_gpp.runtime.executor import Executor, Run
from lightning_gpp.runtime.measured import Mark, RankRecord, RunRecord, WindowRecord
from lightning_gpp.runtime.pace import ActionRecord
from lightning_gpp.schedule import Program
from lightning_gpp.simulate import SpanKind


class StepRecorder:
    """Collects the records of one step at a time; costs next to nothing while it is off.

    Args:
        device: of this rank.

    Attributes:
        is_on: whether it records.
        is_cut: whether it does not any more, because the pipeline began to fill anew.
        on_record: the user's own, gets a record of every action, too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.on_record: Callable[[ActionRecord], None] | None = None
        self.is_on = False
        self.is_cut = False
        self._runs: list[tuple[Run, RunRecord]] = []
        self._marks: list[Mark] = []
        self._open: Mark | None = None
        self._last_read: Mark | None = None
        self._first_number = self._window = 0

    def start(self) -> None:
        """Begins a step; its mini-batch has been read already."""
        self.is_on = True
        self._runs, self._marks, self._open, self._window = [], [], None, 0
        if self._last_read is not None:
            self._note_read(self._last_read)
        self._last_read = None

    def stop(self) -> RankRecord:
        """Ends the step and returns what was recorded."""
        self.end()
        self.is_on = self.is_cut = False
        return RankRecord(tuple(found for _, found in self._runs), tuple(self._marks))

    @property
    def programs(self) -> list[Program]:
        """Of every mini-batch that was recorded; one too small for all replicas has another."""
        return [run.program for run, _ in self._runs]

    def data_read(self, start_ns: int, end_ns: int) -> None:
        """A batch was read. The one of a step is read before the step begins."""
        mark = Mark(SpanKind.DATA, start_ns, end_ns, self._window)
        if not self.is_on:
            self._last_read = mark
        elif self._open is None:  # else it is part of a validation
            self._note_read(mark)

    def _note_read(self, mark: Mark) -> None:
        """What follows until a program runs prepares it."""
        self._marks.append(mark)
        self._open = Mark(SpanKind.PREPARE, mark.end_ns, mark.end_ns, mark.minibatch)

    def end_batch(self) -> None:
        """What was begun is over, and what was read so far does not belong to the next step."""
        self.end()
        self.forget_read()

    def forget_read(self) -> None:
        """What was read so far does not belong to the next step."""
        self._last_read = None

    def begin(self, kind: SpanKind) -> None:
        """Something outside of the program begins."""
        if self.is_on:
            self.end()
            start_ns = time.monotonic_ns()
            self._open = Mark(kind, start_ns, start_ns, self._window)

    def end(self) -> None:
        """It ends, if it was begun, with what it left for the device to do."""
        if self._open is not None:
            synchronize(self._device)
            self._marks.append(replace(self._open, end_ns=time.monotonic_ns()))
            self._open = None

    def part(self, run: Run, *, is_second: bool) -> contextlib.AbstractContextManager[None]:
        """Records a run, or one of its two parts; between them is the user's step.

        Args:
            run: what runs in the body, or a part of it.
            is_second: whether it is over after this.
        """
        return self._part(run, is_second) if self.is_heard else contextlib.nullcontext()

    @contextlib.contextmanager
    def _part(self, run: Run, is_second: bool) -> Iterator[None]:
        with self._recording(run.executor) as records:
            yield
        if not self.is_on:
            return
        end_ns = time.monotonic_ns()
        same = (index for index, (other, _) in enumerate(self._runs) if other is run)
        if (place := next(same, len(self._runs))) == len(self._runs):
            self._runs.append((run, RunRecord((), end_ns)))
        actions = *self._runs[place][1].actions, *records
        self._runs[place] = run, RunRecord(actions, _end_ns(run, records, end_ns))
        turn = SpanKind.WAIT if run.boundary is None else SpanKind.LOSS
        self._open = Mark(SpanKind.FINISH if is_second else turn, end_ns, end_ns, place)

    @contextlib.contextmanager
    def window(self, run: Run, number: int, found: WindowRecord) -> Iterator[None]:
        """Records a window of a pipeline that does not drain, as one of several in a row.

        A recording ends where the pipeline begins to fill anew.

        Args:
            run: whose window runs in the body.
            number: of the mini-batch that goes backward in it, as the program counts.
            found: where the pipeline is.
        """
        if self.is_on and self._runs and found.since == 0:
            self.end()
            self.is_on, self.is_cut = False, True
        if self.is_on:
            self._window = len(self._runs)
            if not self._runs:
                self._first_number = number + run.shift
        shift = run.shift - self._first_number
        with self._recording(run.executor) as records:
            yield
        if not self.is_on:
            return
        end_ns = time.monotonic_ns()
        numbered = tuple(_numbered(record, shift) for record in records)
        self._runs.append((run, RunRecord(numbered, _end_ns(run, records, end_ns), found)))
        self._open = Mark(SpanKind.FINISH, end_ns, end_ns, self._window)

    @property
    def is_heard(self) -> bool:
        """Whether anybody gets records."""
        return self.is_on or self.on_record is not None

    @contextlib.contextmanager
    def heard(self, executor: Executor) -> Iterator[None]:
        """Actions that run in the body are told to the user's own, and not recorded here."""
        executor.on_record = self.on_record
        try:
            yield
        finally:
            executor.on_record = None

    @contextlib.contextmanager
    def _recording(self, executor: Executor) -> Iterator[list[ActionRecord]]:
        """Gives the records of actions that run in the body; none where this is off.

        On emulated devices actions have their emulated moments: what a rank really does beside them
        takes no emulated time.
        """
        records: list[ActionRecord] = []
        is_on, also, pace = self.is_on, self.on_record, executor.pace
        if is_on:
            self.end()

        def on_record(record: ActionRecord) -> None:
            records.append(record if pace is None else pace.timed(record))
            if also is not None:
                also(record)

        with self.heard(executor):
            if is_on:
                executor.on_record = on_record
            yield records


def _end_ns(run: Run, records: list[ActionRecord], now_ns: int) -> int:
    """When a run is over: that of emulated devices with its last action."""
    return records[-1].end_ns if records and run.executor.pace is not None else now_ns


def _numbered(record: ActionRecord, shift: int) -> ActionRecord:
    """An action of a window, as all of its recording count."""
    action = record.action
    return replace(record, action=replace(action, microbatch=action.microbatch + shift))
