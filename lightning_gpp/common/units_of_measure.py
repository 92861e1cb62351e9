"""Bytes, seconds and counts as people read them."""

from __future__ import annotations

from collections.abc import Sequence

SHORTEST_S = 5e-9
"""Less than this is nothing."""


def bytes_text(size_bytes: float) -> str:
    """A number of bytes with a decimal prefix.

    >>> bytes_text(512), bytes_text(1_250_000), bytes_text(123_000_000)
    ('512 B', '1.2 MB', '123 MB')
    """
    if size_bytes < 1000:
        return f"{size_bytes:.0f} B"
    return _scaled(size_bytes / 1000, ("kB", "MB", "GB", "TB"), decimals=1)


def seconds_text(seconds: float) -> str:
    """A duration with a fitting unit, three digits where it has them.

    >>> seconds_text(0.00123), seconds_text(0.25), seconds_text(90.0), seconds_text(2e-9)
    ('1.23 ms', '250 ms', '90.0 s', '0 s')
    """
    if seconds < SHORTEST_S:
        return "0 s"
    return _scaled(seconds * 1e6, ("us", "ms", "s"), decimals=2)


def number_text(number: float) -> str:
    """A number with four digits where it has them, and no exponent.

    >>> number_text(7.25), number_text(415.958), number_text(49890.4)
    ('7.25', '416', '49890')
    """
    return f"{number:.0f}" if number >= 1000 else f"{number:.4g}"


def percent_text(part: float, whole: float) -> str:
    """A part in percent of the whole.

    >>> percent_text(1, 3), percent_text(1, 0)
    ('33 %', '0 %')
    """
    return f"{100 * part / whole if whole else 0:.0f} %"


def count_text(number: int, noun: str) -> str:
    """A number of things.

    >>> count_text(1, "stage"), count_text(2, "micro-batch"), count_text(4, "process")
    ('1 stage', '2 micro-batches', '4 processes')
    """
    plural = f"{noun}es" if noun.endswith(("ch", "ss")) else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def devices_text(devices: Sequence[int]) -> str:
    """The devices of a stage.

    >>> devices_text([3]), devices_text([4, 5, 6])
    ('device 3', 'devices 4-6')
    """
    return f"device{'s' if len(devices) > 1 else ''} {indices_text(devices)}"


def stages_text(stages: Sequence[int]) -> str:
    """Stages by their numbers.

    >>> stages_text([2]), stages_text([0, 1, 4])
    ('stage 2', 'stages 0-1,4')
    """
    return f"stage{'s' if len(stages) > 1 else ''} {indices_text(stages)}"


def indices_text(indices: Sequence[int]) -> str:
    """Indices with runs of consecutive ones joined.

    >>> indices_text([5, 4, 6, 7]), indices_text([0, 2]), indices_text([3])
    ('4-7', '0,2', '3')
    """
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ",".join(texts)


def _scaled(value: float, units: Sequence[str], decimals: int) -> str:
    """The value in the first unit in which it is below 1000."""
    for unit in units[:-1]:
        if value < 999.5:
            return f"{_digits(value, decimals)} {unit}"
        value /= 1000
    return f"{_digits(value, decimals)} {units[-1]}"


def _digits(value: float, decimals: int) -> str:
    """Three digits, and no more than so many behind the point."""
    behind = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{min(behind, decimals)}f}"


def samples_text(samples: float) -> str:
    """A number of samples, which need not be whole.

    >>> samples_text(1024.0), samples_text(12.5), samples_text(14560.3)
    ('1024', '12.5', '14560')
    """
    is_whole = samples == round(samples) or samples >= 100
    return f"{samples:.0f}" if is_whole else f"{samples:.3g}"
