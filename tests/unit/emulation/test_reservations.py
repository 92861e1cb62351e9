"""Both kinds of reservations keep one contract: in one process, and in a file of all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.threads.reservations import LocalReservations

from lightning_gpp.emulation.shared import SharedReservations

PAIR = (0, 1)

Reservations = LocalReservations | SharedReservations
Open = Callable[[], Reservations]
"""Opens what one rank uses; all of them see the same channels."""


@pytest.fixture(params=["local", "shared"])
def open_reservations(request: pytest.FixtureRequest, tmp_path: Path):
    if request.param == "local":
        local = LocalReservations()
        yield lambda: local
        return
    opened = []

    def open_file() -> SharedReservations:
        opened.append(SharedReservations(tmp_path / "file"))
        return opened[-1]

    yield open_file
    for shared in opened:
        shared.close()


def test_what_is_reserved_first_goes_first_and_alone(open_reservations: Open):
    one, other = open_reservations(), open_reservations()
    assert one.reserve(["gpu0 out", "host0 bus"], ready_s=1.0, duration_s=2.0) == 1.0
    assert other.reserve(["gpu1 out"], ready_s=1.5, duration_s=1.0) == 1.5  # beside it
    assert other.reserve(["gpu1 out", "host0 bus"], ready_s=2.0, duration_s=4.0) == 3.0
    assert one.reserve(["gpu0 out"], ready_s=2.0, duration_s=1.0) == 3.0
    assert one.reserve(["host0 bus"], ready_s=9.0, duration_s=1.0) == 9.0


def test_a_meeting_starts_when_the_last_rank_is_ready_and_its_channels_are_free(
    open_reservations: Open,
):
    ranks = [open_reservations(), open_reservations()]
    ranks[0].reserve(["host0 bus"], ready_s=0.0, duration_s=6.0)
    for rank, ready_s in enumerate((5.0, 3.0)):
        ranks[rank].meet((PAIR, 0), ready_s, ["gpu0 out", "host0 bus"], 1.0)
    assert [each.end_s((PAIR, 0)) for each in ranks] == [7.0, 7.0]
    assert ranks[1].reserve(["gpu0 out"], ready_s=0.0, duration_s=1.0) == 7.0  # all its channels


def test_several_meetings_are_open_at_a_time_and_in_every_step(open_reservations: Open):
    ranks = [open_reservations(), open_reservations()]
    for step in range(5):
        for own in ranks:
            for bucket in range(2):
                number = 2 * step + bucket
                own.meet((PAIR, number), 10.0 * step + bucket, ["gpu0 out"], 1.0)
        for own in ranks:
            ends = [own.end_s((PAIR, 2 * step + bucket)) for bucket in range(2)]
            assert ends == [10.0 * step + 1, 10.0 * step + 2]
