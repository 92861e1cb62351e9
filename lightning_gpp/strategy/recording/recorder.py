"""Records one optimizer step on this rank."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from lightning_gpp.common.torch_device import synchronize
from lightning_gpp.runtime.executor import Run
from lightning_gpp.runtime.measured import Mark, RankRecord, RunRecord
from lightning_gpp.runtime.run_state import ActionRecord
from lightning_gpp.schedule import Program
from lightning_gpp.simulate import SpanKind


class StepRecorder:
    """Records one step at a time; costs next to nothing while it is off.

    Args:
        device: of this rank.

    Attributes:
        is_on: whether it records.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_on = False
        self._runs: dict[int, tuple[Run, RunRecord]] = {}
        self._marks: list[Mark] = []
        self._open: Mark | None = None
        self._last_read: Mark | None = None

    def start(self) -> None:
        """Begins a step; its mini-batch has been read already."""
        self.is_on = True
        self._runs, self._marks, self._open = {}, [], None
        self._note_read()

    def stop(self) -> RankRecord:
        """Ends the step and returns what was recorded."""
        self.end()
        self.is_on = False
        return RankRecord(tuple(found for _, found in self._runs.values()), tuple(self._marks))

    @property
    def programs(self) -> list[Program]:
        """Program of every recorded mini-batch; one too small for all replicas has another."""
        return [run.program for run, _ in self._runs.values()]

    def data_read(self, start_ns: int, end_ns: int) -> None:
        """A batch was read. The one of a step is read before the step begins."""
        self._last_read = Mark(SpanKind.DATA, start_ns, end_ns)
        if self.is_on and self._open is None:  # else it is part of a validation
            self._note_read()

    def _note_read(self) -> None:
        """What follows until a program runs prepares it."""
        if (mark := self._last_read) is not None:
            self._marks.append(mark)
            self._open = Mark(SpanKind.PREPARE, mark.end_ns, mark.end_ns)
        self._last_read = None

    def end_batch(self) -> None:
        """Ends the current mark; data read so far do not belong to the next step."""
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

    def part(self, run: Run, *, is_second: bool) -> contextlib.AbstractContextManager[None]:
        """Records a run, or one of its two parts; between them is the user's step.

        Args:
            run: what runs in the body, or a part of it.
            is_second: whether it is over after this.
        """
        return self._part(run, is_second) if self.is_on else contextlib.nullcontext()

    @contextlib.contextmanager
    def _part(self, run: Run, is_second: bool) -> Iterator[None]:
        """On emulated devices actions have their emulated moments.

        What a rank really does beside them takes no emulated time.
        """
        records: list[ActionRecord] = []
        pace = run.executor.pace
        self.end()

        def on_record(record: ActionRecord) -> None:
            records.append(record if pace is None else pace.timed(record))

        run.executor.on_record = on_record
        try:
            yield
        finally:
            run.executor.on_record = None
        end_ns = time.monotonic_ns()
        _, before = self._runs.get(id(run), (run, RunRecord((), end_ns)))
        over_ns = records[-1].end_ns if records and pace is not None else end_ns
        self._runs[id(run)] = run, RunRecord((*before.actions, *records), over_ns)
        place = list(self._runs).index(id(run))
        turn = SpanKind.WAIT if run.boundary is None else SpanKind.LOSS
        self._open = Mark(SpanKind.FINISH if is_second else turn, end_ns, end_ns, place)
