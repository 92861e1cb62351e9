"""Costs of operators for every micro-batch size and every measured kind of device.

Profiles hold for one size on one kind of device. Between and beyond the sizes that were measured,
each quantity is a line ``fixed + per_sample * size`` fitted through its measurements where that
fits (GraphPipe, arXiv 2406.17145, section 5.2, extrapolates by affine functions too), and
otherwise interpolated between the two nearest sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from lightning_gpp.cluster import UNSPECIFIED_KIND
from lightning_gpp.common.data_file import read_document
from lightning_gpp.common.strict_json import JsonFormat
from lightning_gpp.cost.profile import OpProfile, Profile
from lightning_gpp.cost.work import Line

ANY_DEVICE = "any"
"""The ``device`` of a profile that holds for devices of every kind (published workloads)."""

ESTIMATED = "estimated"
"""The ``device`` of a profile that was estimated for no kind in particular."""

WORST_MISFIT = 0.1
"""A line that misses a measurement by more than this part of it is not used."""


@dataclass(frozen=True)
class Costs:
    """Profiles of one model at several micro-batch sizes, on several kinds of devices.

    Attributes:
        profiles: at least one, all of the same operators, one for each kind and size.

    Raises:
        ValueError: they are none, or do not belong together.
    """

    profiles: tuple[Profile, ...]

    def __post_init__(self) -> None:
        if not self.profiles:
            raise ValueError("costs need at least one profile")
        operators = self.profiles[0].operators.keys()
        seen = set()
        for profile in self.profiles:
            key = f"{profile.device} at micro-batch size {profile.microbatch_size}"
            if profile.operators.keys() != operators:
                other = sorted(profile.operators.keys() ^ operators)[:3]
                raise ValueError(f"the profile of {key} is of other operators: {', '.join(other)}")
            if key in seen:
                raise ValueError(f"there are two profiles of {key}; keep one")
            seen.add(key)

    @cached_property
    def by_kind(self) -> dict[str, tuple[Profile, ...]]:
        """Kind of device -> its profiles by rising micro-batch size."""
        found: dict[str, list[Profile]] = {}
        for profile in sorted(self.profiles, key=lambda profile: profile.microbatch_size):
            found.setdefault(profile.device, []).append(profile)
        return {kind: tuple(profiles) for kind, profiles in found.items()}

    def knows(self, kind: str) -> bool:
        """Whether there are costs that hold for devices of a kind."""
        return self._stand_in(kind) is not None

    def kind_for(self, kind: str) -> str:
        """The kind whose profiles hold for devices of a kind: itself, or one that fits them all.

        Raises:
            ValueError: nothing is known of such devices.
        """
        name = self._stand_in(kind)
        if name is None:
            raise ValueError(
                f"no costs for devices of kind {kind!r}, only for {', '.join(self.by_kind)}; "
                "profile on such a device, or estimate its costs"
            )
        return name

    def _stand_in(self, kind: str) -> str | None:
        if kind == UNSPECIFIED_KIND and len(self.by_kind) == 1:
            return next(iter(self.by_kind))
        return next((name for name in (kind, ANY_DEVICE, ESTIMATED) if name in self.by_kind), None)

    @property
    def is_estimated(self) -> bool:
        """Whether any of the profiles is an estimate."""
        return any(profile.is_estimated for profile in self.profiles)

    def line(self, operator: str, quantity: str) -> Line:
        """The growth of a device-independent quantity with the micro-batch size.

        Args:
            operator: name of the operator.
            quantity: ``"activation_bytes"`` or ``"forward_flops"``.
        """
        profiles = next(iter(self.by_kind.values()))
        sizes = [profile.microbatch_size for profile in profiles]
        values = [float(getattr(p.operators[operator], quantity)) for p in profiles]
        if len(sizes) == 1 or not any(values):
            return Line(per_sample=values[0] / sizes[0])
        fixed, slope = _line(sizes, values)
        if fixed < 0 or slope < 0:  # through the origin and the largest size
            return Line(per_sample=values[-1] / sizes[-1])
        return Line(per_sample=slope, fixed=fixed)

    def at(self, microbatch_size: float, kind: str = ANY_DEVICE) -> Profile:
        """The profile for a micro-batch size, measured, fitted or interpolated.

        Args:
            microbatch_size: in samples, above 0.
            kind: kind of the device.

        Raises:
            ValueError: nothing is known of such devices.
        """
        profiles = self.by_kind[self.kind_for(kind)]
        for profile in profiles:
            if profile.microbatch_size == microbatch_size:
                return profile
        sizes = [profile.microbatch_size for profile in profiles]
        return Profile(
            {
                name: _between(sizes, [p.operators[name] for p in profiles], microbatch_size)
                for name in profiles[0].operators
            },
            microbatch_size,
            profiles[0].device,
        )


def _between(sizes: Sequence[float], points: Sequence[OpProfile], size: float) -> OpProfile:
    return OpProfile(
        forward_s=fitted(sizes, [point.forward_s for point in points], size),
        backward_s=fitted(sizes, [point.backward_s for point in points], size),
        activation_bytes=round(fitted(sizes, [p.activation_bytes for p in points], size)),
        forward_flops=fitted(sizes, [point.forward_flops for point in points], size),
    )


def fitted(sizes: Sequence[float], values: Sequence[float], size: float) -> float:
    """The value at a size, from values at other sizes; above 0 where they all are.

    Args:
        sizes: ascending, different.
        values: not negative; with a single one, values are in proportion to sizes.
        size: where to look.

    >>> fitted([1, 2, 4], [3.0, 5.0, 9.0], 8)  # 1 + 2 size
    17.0
    >>> fitted([1, 2, 4], [4.0, 4.0, 8.0], 3)  # no line: between the neighbours
    6.0
    >>> fitted([1, 2, 4], [4.0, 9.0, 4.0], 8)  # the measurement at 2 was disturbed
    4.0
    """
    if len(sizes) == 1:
        return values[0] * size / sizes[0]
    fixed, slope = _line(sizes, values)
    lines_up = all(
        abs(fixed + slope * x - y) <= WORST_MISFIT * y for x, y in zip(sizes, values, strict=True)
    )
    if not lines_up or fixed < 0 or slope < 0:
        fixed, slope = _neighbours(sizes, values, size)
    return max(0.0, fixed + slope * size)


def _line(sizes: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Offset and slope of the line with the smallest sum of squared relative misses."""
    weights = [1 / max(value, 1e-30) ** 2 for value in values]
    total = sum(weights)
    mean_x = sum(w * x for w, x in zip(weights, sizes)) / total
    mean_y = sum(w * y for w, y in zip(weights, values)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, x in zip(weights, sizes))
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, x, y in zip(weights, sizes, values)) / spread
    return mean_y - slope * mean_x, slope


def _neighbours(
    sizes: Sequence[float], values: Sequence[float], size: float
) -> tuple[float, float]:
    """Offset and slope of the line through the measurements on both sides of a size.

    Below the smallest size the value is in proportion. Beyond the largest it grows as between the
    last two; where it falls there (one of them was disturbed), as all of them together do, if at
    all.
    """
    if size <= sizes[0]:
        return 0.0, values[0] / sizes[0]
    right = next((i for i, x in enumerate(sizes) if x >= size), len(sizes) - 1)
    slope = (values[right] - values[right - 1]) / (sizes[right] - sizes[right - 1])
    if size > sizes[-1] and slope < 0:
        slope = max(0.0, _line(sizes, values)[1])
    return values[right] - slope * sizes[right], slope


COSTS_FORMAT = JsonFormat("lightning_gpp.costs", version=1)
costs_to_json = COSTS_FORMAT.dumps
costs_from_json = partial(COSTS_FORMAT.loads, Costs)


def load_costs(path: str | Path) -> Costs:
    """Reads a file that holds costs, in JSON or YAML.

    Raises:
        ValueError: the file is not of that form; the text names it, the key, and what was expected.
        FileNotFoundError: there is no such file.
    """
    found: Costs = read_document(path, {COSTS_FORMAT: Costs})
    return found
