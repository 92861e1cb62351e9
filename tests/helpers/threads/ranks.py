"""The ranks of an emulation as threads of one process, and the steps that they run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

from torch.nn import Parameter

from helpers.threads.reservations import LocalReservations
from helpers.threads.sums import ThreadSumHub, ThreadSums
from helpers.threads.transport import ThreadHub
from helpers.threads.virtual_time import VirtualTime
from lightning_gpp.emulation.clock import EmulatedClock, SlipReport
from lightning_gpp.emulation.rank import EmulatedRank, EmulatedSums, EmulatedTransport
from lightning_gpp.runtime.action_record import ActionRecord
from lightning_gpp.runtime.boundary import Boundary
from lightning_gpp.runtime.executor import Executor, Run
from lightning_gpp.runtime.measured import Mark, RankRecord, RunRecord
from lightning_gpp.runtime.pieces import Cutter
from lightning_gpp.runtime.stage_run import StageCode
from lightning_gpp.schedule import Program
from lightning_gpp.simulate import SpanKind
from lightning_gpp.simulate.program_costs import ProgramCosts


@dataclass(frozen=True, slots=True)
class RankWork:
    """What one rank runs.

    Attributes:
        stages: code of its stages, by their id in the plan.
        parameters: by canonical name.
        boundary: the user's step, on the rank of the loss.
        step: the optimizer's step.
    """

    stages: Mapping[int, StageCode]
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    boundary: Boundary | None = None
    step: Callable[[], None] = lambda: None


@dataclass(slots=True)
class RankSteps:
    """What a rank did in each step.

    Attributes:
        records: its actions, and what was around them.
        slips: what did not fit its emulated time.
        ends_s: when it was through, in emulated seconds.
    """

    records: list[RankRecord] = field(default_factory=list)
    slips: list[SlipReport] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)


class RankThreads:
    """One thread for each device of a program.

    Args:
        program: what they run; rank ``d`` is device ``d``.
        costs: what it costs.
        clock: of all ranks.
        work: of every rank.
        unit_sizes: samples of each of the smallest micro-batches.
        output_names: values that the model returns.
        cutter: cuts and joins values where stages take other numbers of samples.
        timeout_s: limit of every wait, in real seconds.
        virtual: the time of the clock, if it is not this machine's.
    """

    def __init__(
        self,
        program: Program,
        costs: ProgramCosts,
        clock: EmulatedClock,
        work: Sequence[RankWork],
        *,
        unit_sizes: Sequence[int],
        output_names: tuple[str, ...],
        cutter: Cutter,
        timeout_s: float,
        virtual: VirtualTime | None = None,
    ) -> None:
        self._virtual = virtual
        self._program, self._costs, self._clock, self._work = program, costs, clock, work
        self._unit_sizes = unit_sizes
        condition = threading.Condition if virtual is None else virtual.condition
        self._hub, sum_hub = ThreadHub(len(work), condition), ThreadSumHub(condition)
        reservations = LocalReservations()
        every = tuple(range(len(work)))
        self._paces = [EmulatedRank(rank, clock, reservations, costs) for rank in every]
        self._sums = [ThreadSums(sum_hub, rank) for rank in every]
        self._executors = [
            Executor(
                transport=EmulatedTransport(self._hub.transport(rank), pace, every),
                rank_of_device=every,
                stages=work[rank].stages,
                output_names=output_names,
                cutter=cutter,
                shared=work[rank].parameters,
                sums=EmulatedSums(self._sums[rank], pace),
                timeout_s=timeout_s,
                pace=pace,
            )
            for rank, pace in enumerate(self._paces)
        ]
        self._errors: list[BaseException] = []

    def run(self, num_steps: int) -> list[RankSteps]:
        """Runs steps on all ranks; raises the first error of any."""
        found = [RankSteps() for _ in self._work]

        def steps(rank: int) -> None:
            taking_turns = nullcontext() if self._virtual is None else self._virtual.thread(rank)
            try:
                with taking_turns:
                    self._paces[rank].wait_until(0.0)
                    for _ in range(num_steps):
                        self._step(rank, found[rank])
            except BaseException as error:
                self._fail(error)

        threads = [threading.Thread(target=steps, args=(rank,)) for rank in range(len(found))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]
        return found

    def _fail(self, error: BaseException) -> None:
        """Ends all ranks with an error."""
        self._errors.append(error)
        for mailbox in self._hub.mailboxes:
            mailbox.waits.abort(error)
        for sums in self._sums:
            sums.waits.abort(error)

    def _step(self, rank: int, found: RankSteps) -> None:
        """One optimizer step of one rank."""
        pace, executor = self._paces[rank], self._executors[rank]
        actions: list[ActionRecord] = []
        marks: list[Mark] = []
        executor.on_record = actions.append
        boundary = self._work[rank].boundary
        Run(executor, self._program, self._unit_sizes, training=True, boundary=boundary).whole()
        run = RunRecord(tuple(actions), time.monotonic_ns())
        with _marked(marks, SpanKind.OPTIMIZER):
            self._update(rank, pace)
        found.ends_s.append(self._clock.now_s())
        found.records.append(RankRecord((run,), tuple(marks)))
        found.slips.append(pace.take_slips())

    def _update(self, rank: int, pace: EmulatedRank) -> None:
        """The update that ends the program."""
        program = self._program
        done = len(program.before_update(rank))
        with pace.run(program, rank, has_sums=False):
            for action in program.device_actions(rank)[done:]:
                with pace.action(action):
                    self._work[rank].step()


@contextmanager
def _marked(marks: list[Mark], kind: SpanKind) -> Iterator[None]:
    start_ns = time.monotonic_ns()
    yield
    marks.append(Mark(kind, start_ns, time.monotonic_ns()))
