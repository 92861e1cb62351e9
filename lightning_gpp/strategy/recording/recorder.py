"""Records on this rank what one optimizer step consists of, while it is asked to."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from lightning_gpp.common.torch_device import synchronize
from lightning_gpp.runtime.executor import Executor, Run
from lightning_gpp.runtime.measured import Mark, RankRecord, RunRecord
from lightning_gpp.runtime.run_state import ActionRecord
from lightning_gpp.schedule import Program
from lightning_gpp.simulate import SpanKind


class StepRecorder:
    """Collects the records of one step at a time; costs next to nothing while it is off.

    Args:
        device: of this rank.

    Attributes:
        is_on: whether it records.
        on_record: the user's own, gets a record of every action, too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.on_record: Callable[[ActionRecord], None] | None = None
        self.is_on = False
        self._runs: list[tuple[Run, RunRecord]] = []
        self._marks: list[Mark] = []
        self._open: Mark | None = None
        self._last_read: Mark | None = None

    def start(self) -> None:
        """Begins a step; its mini-batch has been read already."""
        self.is_on = True
        self._runs, self._marks, self._open = [], [], None
        if self._last_read is not None:
            self._note_read(self._last_read)
        self._last_read = None

    def stop(self) -> RankRecord:
        """Ends the step and returns what was recorded."""
        self.end()
        self.is_on = False
        return RankRecord(tuple(found for _, found in self._runs), tuple(self._marks))

    @property
    def programs(self) -> list[Program]:
        """Of every mini-batch that was recorded; one too small for all replicas has another."""
        return [run.program for run, _ in self._runs]

    def data_read(self, start_ns: int, end_ns: int) -> None:
        """A batch was read. The one of a step is read before the step begins."""
        mark = Mark(SpanKind.DATA, start_ns, end_ns)
        if not self.is_on:
            self._last_read = mark
        elif self._open is None:  # else it is part of a validation
            self._note_read(mark)

    def _note_read(self, mark: Mark) -> None:
        """What follows until a program runs prepares it."""
        self._marks.append(mark)
        self._open = Mark(SpanKind.PREPARE, mark.end_ns, mark.end_ns)

    def end_batch(self) -> None:
        """What was begun is over, and what was read so far does not belong to the next step."""
        self.end()
        self._last_read = None

    def begin(self, kind: SpanKind) -> None:
        """Something outside of the program begins."""
        if self.is_on:
            self.end()
            start_ns = time.monotonic_ns()
            self._open = Mark(kind, start_ns, start_ns)

    def end(self) -> None:
        """It ends, if it was begun, with what it left for the device to do."""
        if self._open is not None:
            synchronize(self._device)
            self._marks.append(replace(self._open, end_ns=time.monotonic_ns()))
            self._open = None

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

    def part(self, run: Run, *, is_second: bool) -> contextlib.AbstractContextManager[None]:
        """Records a run, or one of its two parts; between them is the user's step.

        Args:
            run: what runs in the body, or a part of it.
            is_second: whether it is over after this.
        """
        if not self.is_on:
            return self.heard(run.executor) if self.is_heard else contextlib.nullcontext()
        return self._part(run, is_second)

    @contextlib.contextmanager
    def _part(self, run: Run, is_second: bool) -> Iterator[None]:
        """On emulated devices actions have their emulated moments.

        What a rank really does beside them takes no emulated time.
        """
        records: list[ActionRecord] = []
        also, pace = self.on_record, run.executor.pace
        self.end()

        def on_record(record: ActionRecord) -> None:
            records.append(record if pace is None else pace.timed(record))
            if also is not None:
                also(record)

        with self.heard(run.executor):
            run.executor.on_record = on_record
            yield
        end_ns = time.monotonic_ns()
        same = (index for index, (other, _) in enumerate(self._runs) if other is run)
        if (place := next(same, len(self._runs))) == len(self._runs):
            self._runs.append((run, RunRecord((), end_ns)))
        actions = *self._runs[place][1].actions, *records
        over_ns = records[-1].end_ns if records and pace is not None else end_ns
        self._runs[place] = run, RunRecord(actions, over_ns)
        turn = SpanKind.WAIT if run.boundary is None else SpanKind.LOSS
        self._open = Mark(SpanKind.FINISH if is_second else turn, end_ns, end_ns, place)
