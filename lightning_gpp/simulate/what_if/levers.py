"""What a change would buy: faster links, better overlap, fewer bytes, faster input, more devices.

Every change is simulated anew, so that it shows what becomes the bottleneck after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from lightning_gpp.simulate.simulation import Simulation
from lightning_gpp.simulate.what_if.changes import WhatIf

CaseT = TypeVar("CaseT", bound="Case")


class Case(Protocol):
    """A way to train on a cluster that can be simulated, and changed."""

    @property
    def samples(self) -> float:
        """Samples of a step."""

    @property
    def has_input(self) -> bool:
        """Whether reading and copying the input takes time."""

    def simulate(self) -> Simulation:
        """A step, or the last of several."""

    def changed(self: CaseT, what_if: WhatIf) -> CaseT:
        """The same in a changed world."""

    def better_overlap(self: CaseT) -> Mapping[str, CaseT]:
        """What can be hidden better: name of the change -> the case with it."""

    def twice_the_devices(self: CaseT) -> CaseT:
        """On twice the devices, with as many samples for each.

        Raises:
            ValueError: there is no such case.
        """


@dataclass(frozen=True, slots=True)
class Lever:
    """A change, and what it buys.

    Attributes:
        name: of the change.
        step_s: seconds of a step with it; None where it cannot be had.
        samples_per_s: throughput with it.
        gain: by how much the throughput grows, as a part of what it was.
        note: why it cannot be had.
    """

    name: str
    step_s: float | None = None
    samples_per_s: float | None = None
    gain: float | None = None
    note: str = ""


FACTORS: Mapping[str, WhatIf] = {
    "twice the bandwidth": WhatIf(bandwidth=2.0),
    "half the latency": WhatIf(latency=0.5),
    "half the bytes": WhatIf(bytes=0.5),
    "devices twice as fast": WhatIf(compute=2.0),
}
INPUT = {"input twice as fast": WhatIf(input=2.0)}
DEVICES = "twice the devices"


def levers(case: Case) -> list[Lever]:
    """The changes to a case, that which buys most first; those that cannot be had last."""
    before = case.samples / case.simulate().step_s
    found = [_lever(name, make, before) for name, make in _changes(case)]
    return sorted(found, key=lambda lever: -1.0 if lever.gain is None else lever.gain, reverse=True)


def _changes(case: CaseT) -> Iterator[tuple[str, Callable[[], CaseT]]]:
    for name, what_if in (*FACTORS.items(), *(INPUT.items() if case.has_input else ())):
        yield name, partial(case.changed, what_if)
    for name, better in case.better_overlap().items():
        yield name, partial(_itself, better)
    yield DEVICES, case.twice_the_devices


def _itself(case: CaseT) -> CaseT:
    return case


def _lever(name: str, make: Callable[[], Case], before: float) -> Lever:
    try:
        case = make()
    except ValueError as error:
        return Lever(name, note=str(error))
    simulation = case.simulate()
    samples_per_s = case.samples / simulation.step_s
    return Lever(name, simulation.minibatch_s, samples_per_s, samples_per_s / before - 1)


def speedups(cases: Mapping[int, CaseT]) -> dict[int, float]:
    """Number of devices -> how many times the throughput of one device (weak scaling).

    With as many samples per device, ``S = N t(1) / t(N)`` (arXiv 1805.03812).

    Args:
        cases: number of devices -> the case; 1 is among them.
    """
    rates = {count: case.samples / case.simulate().step_s for count, case in cases.items()}
    return {count: rate / rates[1] for count, rate in rates.items()}
