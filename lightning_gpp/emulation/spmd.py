"""Emulated devices of an SPMD program: every rank is a process, at the pace of a described device.

The first two training steps run as fast as they can where the user gives no time scale. The second
shows how slowly emulated time has to pass for the real work to fit into it; the first one is no
measure, as it connects the ranks and fills caches.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_gpp.emulation.clock import EmulatedClock, EmulatedCursor, EmulatedSteps
from lightning_gpp.emulation.real_time import RealTime
from lightning_gpp.emulation.report import EmulationReport, emulation_report
from lightning_gpp.emulation.time_scale import MARGIN, most_slowly
from lightning_gpp.spmd.costs.judge import evaluate_program
from lightning_gpp.spmd.costs.machine import Machine
from lightning_gpp.spmd.run.emulated import CountedTime, Cursor, EmulatedProgram
from lightning_gpp.spmd.run.interpreter import Interpreter


@dataclass
class SpmdEmulation(RealTime[Interpreter]):
    """The emulated devices of a run, as one rank sees them.

    Attributes:
        asked_scale: real seconds that an emulated second takes; None to find them out.
        kinds: of the devices.
        machine: the devices and their network.
        control: between the ranks (:class:`~lightning_gpp.strategy.ranks.control.Control`).
        sleep: lets real seconds pass.
        timed: the steps of this rank, once emulated time has begun.
    """

    asked_scale: float | None
    kinds: Sequence[str]
    machine: Machine
    control: Any
    sleep: Callable[[float], None] = time.sleep
    timed: EmulatedSteps | None = None
    _paces: dict[int, tuple[Interpreter, EmulatedProgram]] = field(default_factory=dict)
    _free: list[tuple[float, float]] = field(default_factory=list)
    """Real and emulated seconds of every half that ran as fast as it could."""
    _is_warm: bool = False

    @contextlib.contextmanager
    def step(self, work: Interpreter, *, is_second: bool = False) -> Iterator[None]:
        """All ranks: the body runs a half of a training call at the emulated devices' pace."""
        if self.timed is None and self.asked_scale is not None:
            self._begin(self.asked_scale)
        if self.timed is None or (is_second and not self.timed.steps):
            cursor, since = CountedTime(), time.perf_counter()
            with self._paced(work, cursor):
                yield
            self._free.append((time.perf_counter() - since, cursor.cursor_s))
            if is_second and self.timed is None:
                self._end_free_step()
            return
        is_first_export = int(not self._paces or work is self._first)
        with (
            self.timed.part(is_first_export, is_second=is_second),
            self._paced(work, self.timed.cursor),
        ):
            yield

    @property
    def _first(self) -> Interpreter:
        """The export that was trained on first, whose steps are reported."""
        return next(iter(self._paces.values()))[0]

    @contextlib.contextmanager
    def _paced(self, interpreter: Interpreter, cursor: Cursor) -> Iterator[None]:
        """The body is told of on a cursor; a backward goes at the pace of its forward."""
        if id(interpreter) not in self._paces:
            made = EmulatedProgram.of(
                interpreter.graph, interpreter.program, interpreter.collectives, self.machine
            )
            self._paces[id(interpreter)] = interpreter, made
        _, pace = self._paces[id(interpreter)]
        pace.begin_half(cursor)
        interpreter.pace = pace
        try:
            yield
        finally:
            interpreter.pace = None

    def _end_free_step(self) -> None:
        """All ranks: the first step is forgotten, the second one gives the scale."""
        if self._is_warm:
            with self.control.together():
                scale = self.control.combined(
                    most_slowly(self._free),
                    lambda every: MARGIN * max(every),
                    "gathering how fast ranks really are",
                )
            self._begin(scale)
        self._is_warm = True
        self._free.clear()

    def _begin(self, time_scale: float) -> None:
        """All ranks: emulated time begins."""
        with self.control.together():
            origin_ns = self.control.share(
                time.monotonic_ns(), "waiting for rank 0 to begin emulated time"
            )
        clock = EmulatedClock(origin_ns, time_scale, sleep=self.sleep)
        self.timed = EmulatedSteps(EmulatedCursor(self.control.rank, clock), self.control)

    def report(self) -> EmulationReport | None:
        """All ranks: on rank 0 what the steps took; None elsewhere, or if there were none."""
        ranks = [] if self.timed is None else self.timed.gathered()
        if self.timed is None or not ranks or not self._paces:
            return None
        first = self._first
        return emulation_report(
            ranks,
            num_microbatches=1,
            predicted_s=evaluate_program(first.program, first.graph, self.machine).step_s,
            time_scale=self.timed.cursor.clock.time_scale,
            kinds=self.kinds,
        )
