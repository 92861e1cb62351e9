"""What the units of a model take on the devices of a space at least, whatever their stages are.

Time, and memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate

from lightning_gpp.planner.graphpipe.space.crew import Crew


class Load:
    """The work of all units, where stages have one of some crews.

    Args:
        least_each: of a crew, the seconds per sample that the unit at every place takes at least.
        kept_each: of a crew, the bytes of activations that the unit at every place keeps.
        crews: the devices that a stage may have.
        num_devices: how many devices there are.
    """

    def __init__(
        self,
        least_each: Callable[[Crew], Sequence[float]],
        kept_each: Callable[[Crew], Sequence[float]],
        crews: Sequence[Crew],
        num_devices: int,
    ) -> None:
        self._least_each = least_each
        self._kept_each = kept_each
        self._crews = crews
        self._num_devices = num_devices

    @cached_property
    def work(self) -> list[float]:
        """Running sums over the places of device-seconds per sample that units take at least."""
        each = [
            [crew.num_replicas * step_s for step_s in self._least_each(crew)]
            for crew in self._crews
        ]
        return [*accumulate(columns_min(each), initial=0.0)]

    @cached_property
    def lower_bound_s(self) -> float:
        """Seconds per sample that no division can beat: equal shares, or the slowest units."""
        each_s = columns_min([self._least_each(crew) for crew in self._crews])
        num_stages = self._num_devices // min(crew.num_replicas for crew in self._crews)
        slowest_s = crowded_s(each_s, num_stages) if len(self._crews) == 1 else max(each_s)
        return max(self.work[-1] / self._num_devices, slowest_s)

    def activation_bytes(self, in_flight: Callable[[Crew], int]) -> float:
        """Bytes of activations that all devices together hold at least.

        Args:
            in_flight: micro-batches that a stage on some devices holds at least.
        """
        each = [
            [crew.num_replicas * in_flight(crew) * kept for kept in self._kept_each(crew)]
            for crew in self._crews
        ]
        return sum(columns_min(each))


def crowded_s(each_s: Sequence[float], num_stages: int) -> float:
    """Seconds that some stage takes at least: of more units than stages, two are in one.

    And of more than twice as many units three, and so on; so it holds at least the lightest of the
    heaviest that cannot be without such company.

    Args:
        each_s: seconds of every unit.
        num_stages: most stages.

    >>> crowded_s([4, 3, 3, 2], num_stages=2), crowded_s([5, 1], num_stages=2)
    (6, 5)
    """
    heaviest = sorted(each_s, reverse=True)
    return max(
        sum(heaviest[first - first // num_stages : first + 1])
        for first in range(0, len(heaviest), num_stages)
    )


def columns_min(rows: Sequence[Sequence[float]]) -> Sequence[float]:
    """The least of every column of some rows."""
    return list(map(min, *rows)) if len(rows) > 1 else rows[0]
