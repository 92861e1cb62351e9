"""With what the devices of a run are timed; the times here are made up."""

from __future__ import annotations

import pytest

from lightning_gpp.spmd.costs.machine import AlphaBeta
from lightning_gpp.strategy.spmd import planners

MIB = 1 << 20


@pytest.mark.parametrize(
    ("line", "largest"),
    [
        (AlphaBeta(100e-6, 1 / 125e6), 4 * MIB),  # 1 Gbit/s: 34 ms
        (AlphaBeta(20e-6, 1 / 300e9), 64 * MIB),  # NVLink: 4 MiB take no longer than two small ones
    ],
)
def test_messages_are_as_large_as_shows_the_bandwidth(line: AlphaBeta, largest: int) -> None:
    sizes = []

    def seconds(size_bytes: int) -> float:
        sizes.append(size_bytes)
        return line.alpha_s + line.beta_s_per_byte * size_bytes

    found = planners.line_of(seconds)
    assert (found.alpha_s, found.beta_s_per_byte) == pytest.approx(
        (line.alpha_s, line.beta_s_per_byte)
    )
    assert max(sizes) == largest
