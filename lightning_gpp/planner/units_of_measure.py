"""Bytes and seconds as people read them."""

from __future__ import annotations


def bytes_text(size_bytes: float) -> str:
    """A number of bytes with a decimal prefix.

    >>> bytes_text(512), bytes_text(1_250_000), bytes_text(123_000_000)
    ('512 B', '1.2 MB', '123 MB')
    """
    if size_bytes < 1000:
        return f"{size_bytes:.0f} B"
    return _scaled(size_bytes / 1000, ("kB", "MB", "GB", "TB"), step=1000.0)


def seconds_text(seconds: float) -> str:
    """A duration with a fitting unit.

    >>> seconds_text(0.00123), seconds_text(0.25), seconds_text(90.0)
    ('1.2 ms', '250 ms', '90.0 s')
    """
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return _scaled(seconds * 1e6, ("us", "ms"), step=1000.0)


def _scaled(value: float, units: tuple[str, ...], step: float) -> str:
    for unit in units[:-1]:
        if value < 999.5:
            return f"{value:.1f} {unit}" if value < 99.95 else f"{value:.0f} {unit}"
        value /= step
    return f"{value:.1f} {units[-1]}" if value < 99.95 else f"{value:.0f} {units[-1]}"
