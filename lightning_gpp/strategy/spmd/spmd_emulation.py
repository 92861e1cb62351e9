"""Emulated devices of an SPMD program: every rank is a process, at the pace of a described device.

The first two training steps run as fast as they can where the user gives no time scale. The second
shows how slowly emulated time has to pass for the real work to fit into it; the first one is no
measure, as it connects the ranks and fills caches.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lightning_gpp.cluster import Cluster
from lightning_gpp.runtime.emulation.clock import EmulatedClock
from lightning_gpp.runtime.emulation.cursor import EmulatedCursor
from lightning_gpp.runtime.emulation.time_scale import SHORT
from lightning_gpp.spmd.costs.judge import evaluate_program
from lightning_gpp.spmd.costs.prices import Machine, PriceList
from lightning_gpp.spmd.run.emulated import (
    EmulatedProgram,
    MeasuredSlowness,
    OwnHalf,
    instruction_name,
    own_halves,
)
from lightning_gpp.spmd.run.interpreter import Interpreter
from lightning_gpp.strategy.emulation.emulated_pace import MARGIN
from lightning_gpp.strategy.emulation.emulated_steps import EmulatedSteps
from lightning_gpp.strategy.emulation.emulation_report import EmulationReport, emulation_report
from lightning_gpp.strategy.ranks.control import Control
from lightning_gpp.strategy.settings import Emulated
from lightning_gpp.strategy.spmd.hap_planner import machine_of


@dataclass
class SpmdEmulation:
    """The emulated devices of a run, as one rank sees them.

    Attributes:
        options: what the user asked for.
        cluster: the devices.
        control: between the ranks.
        rank: this one.
        timed: the steps of this rank, once emulated time has begun.
    """

    options: Emulated
    cluster: Cluster
    control: Control
    rank: int
    timed: EmulatedSteps | None = None
    _machine: Machine = field(init=False)
    _first: Interpreter | None = None
    _paces: dict[int, tuple[Interpreter, EmulatedProgram]] = field(default_factory=dict)
    _slowness: MeasuredSlowness | None = None
    _is_warm: bool = False

    def __post_init__(self) -> None:
        self._machine = machine_of(self.cluster, None)

    @contextlib.contextmanager
    def part(self, interpreter: Interpreter, *, is_second: bool) -> Iterator[None]:
        """All ranks: the body runs a half of a training call at the emulated devices' pace."""
        self._first = self._first or interpreter
        if self.timed is None and self.options.time_scale is not None:
            with self.control.together():
                self._begin(self.options.time_scale)
        if self.timed is None or (is_second and not self.timed.steps):
            with self._measured(interpreter):
                yield
            if is_second and self.timed is None:
                self._end_free_step()
            return
        pace = self._pace_of(interpreter, self.timed.cursor)
        with (
            self.timed.part(int(interpreter is self._first), is_second=is_second),
            _at(interpreter, pace),
        ):
            yield

    def _pace_of(self, interpreter: Interpreter, cursor: EmulatedCursor) -> EmulatedProgram:
        """One for all calls of an export: a backward goes at the pace of its forward."""
        key = id(interpreter)
        if key not in self._paces:
            names = tuple(map(instruction_name, interpreter.program.instructions))
            pace = EmulatedProgram(
                cursor,
                interpreter.collectives,
                self._halves_of(interpreter),
                self._machine.times,
                names,
            )
            self._paces[key] = interpreter, pace
        return self._paces[key][1]

    def _halves_of(self, interpreter: Interpreter) -> dict[bool, tuple[OwnHalf, ...]]:
        prices = PriceList(interpreter.graph, self._machine, interpreter.program.shares)
        return own_halves(interpreter.program, prices, self.rank)

    @contextlib.contextmanager
    def _measured(self, interpreter: Interpreter) -> Iterator[None]:
        """The body runs as fast as it can, and what it takes is noted."""
        if self._slowness is None:
            self._slowness = MeasuredSlowness(self._halves_of(interpreter))
        self._slowness.begin_half()
        with _at(interpreter, self._slowness):
            yield

    def _end_free_step(self) -> None:
        """All ranks: the first step is forgotten, the second one gives the scale."""
        assert self._slowness is not None
        if self._is_warm:
            with self.control.together():
                self._begin(self._agreed_scale())
        else:
            self._is_warm = True
            self._slowness.pairs.clear()

    def _agreed_scale(self) -> float:
        """All ranks: the most that a stretch takes really per emulated second, and some more."""
        assert self._slowness is not None
        pairs = self._slowness.pairs
        longest_s = max((emulated_s for _, emulated_s in pairs), default=0.0)
        own = max(
            (real_s / emulated_s for real_s, emulated_s in pairs if emulated_s > SHORT * longest_s),
            default=1.0,
        )
        every = self.control.gather(own, "gathering how fast ranks really are")
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
        cursor = EmulatedCursor(self.rank, EmulatedClock(origin_ns, time_scale))
        self.timed = EmulatedSteps(cursor, self.control, self.cluster.num_devices)

    def abort(self, error: BaseException) -> None:
        """Ends every sleep of this rank with an error."""
        if self.timed is not None:
            self.timed.cursor.clock.abort(error)

    def report(self) -> EmulationReport | None:
        """All ranks: on rank 0 what the steps took; None elsewhere, or if there were none."""
        if self.timed is None or self._first is None:
            return None
        ranks = self.timed.gathered()
        if not ranks:
            return None
        evaluation = evaluate_program(self._first.program, self._first.graph, self._machine)
        return emulation_report(
            ranks,
            num_microbatches=1,
            predicted_s=evaluation.step_s,
            time_scale=self.timed.cursor.clock.time_scale,
            kinds=self.cluster.kinds,
        )


@contextlib.contextmanager
def _at(interpreter: Interpreter, pace: Any) -> Iterator[None]:
    interpreter.pace = pace
    try:
        yield
    finally:
        interpreter.pace = None
