"""Memory of the devices over the time of a simulation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from lightning_gpp.schedule import Kind, Program
from lightning_gpp.simulate.engine.times import Times
from lightning_gpp.simulate.program_costs import ProgramCosts
from lightning_gpp.simulate.simulation import TaskKind

COMPUTE = (TaskKind.FORWARD, TaskKind.BACKWARD)


class DeviceMemory(Mapping[int, Sequence[tuple[float, float]]]):
    """Device -> (seconds, bytes) whenever the memory in use changes; found when asked for.

    What stages hold all the time (``fixed_bytes``) is there from the start. A forward takes
    ``activation_bytes`` at its start, its backward gives them back at its end and uses
    ``working_bytes`` meanwhile; where nothing goes backward, the forward gives them back itself.

    Args:
        program: what was played.
        costs: bytes of the stages.
        times: when.
    """

    def __init__(self, program: Program, costs: ProgramCosts, times: Times) -> None:
        self._program, self._costs, self._times = program, costs, times

    def __len__(self) -> int:
        return len(self._program.actions)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __getitem__(self, device: int) -> Sequence[tuple[float, float]]:
        if device not in self._curves:
            if not 0 <= device < len(self):
                raise KeyError(device)
            self._curves[device] = self._curve(device)
        return self._curves[device]

    @cached_property
    def _curves(self) -> dict[int, Sequence[tuple[float, float]]]:
        return {}

    def _curve(self, device: int) -> list[tuple[float, float]]:
        homes = enumerate(self._program.devices)
        in_use = sum(self._costs.stages[s].fixed_bytes for s, home in homes if home == device)
        curve = [(0.0, in_use)]
        for at_s, change in self._changes(device):
            if change:
                in_use += change
                curve.append((at_s, in_use))
        return curve

    def _changes(self, device: int) -> Iterator[tuple[float, float]]:
        """(seconds, bytes more or less) in the order of the device's line, which is time's."""
        compiled, played = self._times.compiled, self._times.played
        for step in range(self._times.num_steps):
            for item in compiled.work.lines[device]:
                shown = compiled.items[item]
                if shown.kind not in COMPUTE or shown.action is None:
                    continue
                costs = self._costs.stages[shown.action.stage]
                start_s = played.start_s[step * len(compiled.items) + item]
                end_s = start_s + compiled.work.seconds[item]
                kept, used = costs.activation_bytes, costs.working_bytes
                if shown.action.kind is Kind.FORWARD:
                    yield start_s, kept
                    if not self._program.has_backward:
                        yield end_s, -kept
                else:
                    yield start_s, used
                    yield end_s, -used - kept
