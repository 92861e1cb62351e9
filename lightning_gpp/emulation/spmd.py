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

from lightning_gpp.emulation.clock import EmulatedClock, EmulatedCursor
from lightning_gpp.emulation.real_time import RealTime
from lightning_gpp.emulation.report import EmulationReport, emulation_report
from lightning_gpp.emulation.steps import EmulatedSteps, RanksTogether
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
        control: between the ranks.
        sleep: lets real seconds pass.
        timed: the steps of this rank, once emulated time has begun.
    """

    asked_scale: float | None
    kinds: Sequence[str]
    machine: Machine
    control: RanksTogether
    sleep: Callable[[float], None] = time.sleep
    timed: EmulatedSteps | None = None
    _first: Interpreter | None = None
    _paces: dict[int, tuple[Interpreter, EmulatedProgram]] = field(default_factory=dict)
    _free: list[tuple[float, float]] = field(default_factory=list)
    """Real and emulated seconds of every half that ran as fast as it could."""
    _is_warm: bool = False

    @contextlib.contextmanager
    def step(self, work: Interpreter, *, is_second: bool = False) -> Iterator[int]:
        """All ranks: the body runs a half of a training call at the emulated devices' pace."""
        self._first = self._first or work
        if self.timed is None and self.asked_scale is not None:
            with self.control.together():
                self._begin(self.asked_scale)
        if self.timed is None or (is_second and not self.timed.steps):
            cursor, since = CountedTime(), time.perf_counter()
            with self._paced(work, cursor):
                yield 0
            self._free.append((time.perf_counter() - since, cursor.cursor_s))
            if is_second and self.timed is None:
                self._end_free_step()
            return
        with (
            self.timed.part(int(work is self._first), is_second=is_second) as still_ns,
            self._paced(work, self.timed.cursor),
        ):
            yield still_ns

    @contextlib.contextmanager
    def _paced(self, interpreter: Interpreter, cursor: Cursor) -> Iterator[None]:
        """The body is told of on a cursor; a backward goes at the pace of its forward."""
        key = id(interpreter)
        if key not in self._paces:
            pace = EmulatedProgram.of(
                interpreter.graph, interpreter.program, interpreter.collectives, self.machine
            )
            self._paces[key] = interpreter, pace
        pace = self._paces[key][1]
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
                self._begin(self._agreed_scale())
        self._is_warm = True
        self._free.clear()

    def _agreed_scale(self) -> float:
        """All ranks: the most that a half takes really per emulated second, and some more."""
        every = self.control.gather(most_slowly(self._free), "gathering how fast ranks really are")
        found: float = self.control.share(
            MARGIN * max(every) if every else None, "waiting for the scale of emulated time"
        )
        return found

    def _begin(self, time_scale: float) -> None:
        """All ranks: emulated time begins."""
        origin_ns = self.control.share(
            time.monotonic_ns() if self.control.is_leader else None,
            "waiting for rank 0 to begin emulated time",
        )
        clock = EmulatedClock(origin_ns, time_scale, sleep=self.sleep)
        cursor = EmulatedCursor(self.control.rank, clock)
        self.timed = EmulatedSteps(cursor, self.control)

    def report(self) -> EmulationReport | None:
        """All ranks: on rank 0 what the steps took; None elsewhere, or if there were none."""
        if self.timed is None or self._first is None:
            return None
        ranks = self.timed.gathered()
        if not ranks:
            return None
        evaluation = evaluate_program(self._first.program, self._first.graph, self.machine)
        return emulation_report(
            ranks,
            num_microbatches=1,
            predicted_s=evaluation.step_s,
            time_scale=self.timed.cursor.clock.time_scale,
            kinds=self.kinds,
        )
