"""One clock for all ranks: how far each rank's clock is from that of rank 0.

The clock is ``time.monotonic_ns``. Processes of one host share it. Between hosts the distance is
estimated as Cristian's algorithm does (Distributed Computing 3, 1989), with the four times of NTP
(RFC 5905, section 8): a rank asks rank 0 for the time several times and trusts the exchange that
was back soonest, since its distance is uncertain by half of what it was under way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_gpp.runtime.payload import pack_object, unpack_object
from lightning_gpp.runtime.processes.rank_devices import host_identity
from lightning_gpp.runtime.transport.transport import Tag, Transport

NUM_EXCHANGES = 16
_CLOCK: Tag = (-5, 0, 0, 0)
_PURPOSE = "comparing the clocks"


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """How a rank's clock relates to that of rank 0.

    Attributes:
        offset_ns: to be added to the rank's times to get those of rank 0.
        error_ns: by how much that may be off, either way.
    """

    offset_ns: int
    error_ns: int


Exchange = tuple[int, int, int, int]
"""One question for the time: when it was asked, on the asking rank's clock; heard and answered, on
rank 0's; and when the answer was back."""


def estimate_offset(exchanges: Sequence[Exchange]) -> ClockOffset:
    """The offset that the quickest of some exchanges shows.

    >>> estimate_offset([(100, 1150, 1150, 200), (300, 1310, 1312, 322)])
    ClockOffset(offset_ns=1000, error_ns=10)
    """

    def under_way_ns(exchange: Exchange) -> int:
        asked_ns, heard_ns, answered_ns, back_ns = exchange
        return (back_ns - asked_ns) - (answered_ns - heard_ns)

    best = asked_ns, heard_ns, answered_ns, back_ns = min(exchanges, key=under_way_ns)
    twice = (heard_ns - asked_ns) + (answered_ns - back_ns)
    return ClockOffset(twice // 2, -(-under_way_ns(best) // 2))


def measure_offset(
    transport: Transport,
    *,
    timeout_s: float,
    now_ns: Callable[[], int] = time.monotonic_ns,
    host: str | None = None,
) -> ClockOffset:
    """All ranks, together: this rank's offset to rank 0.

    Ranks on rank 0's host have none, provided that the measurement agrees.

    Args:
        transport: between the ranks.
        timeout_s: limit of every wait.
        now_ns: reads this rank's clock.
        host: what tells this host from others; by default what the system says.

    Raises:
        TransportError: a rank has gone or did not answer in time.
    """
    host = host or host_identity()
    exchanges, leader_host = [], ""
    others = range(1, transport.num_ranks) if transport.rank == 0 else (0,)
    for rank in others:
        for _ in range(NUM_EXCHANGES):
            asked_ns = now_ns()
            if transport.rank:
                transport.send(pack_object(None), target=0, tag=_CLOCK)
            came = transport.receive(source=rank, tag=_CLOCK, timeout_s=timeout_s, purpose=_PURPOSE)
            back_ns = now_ns()
            if transport.rank:
                leader_host, heard_ns, answered_ns = unpack_object(came)
                exchanges.append((asked_ns, heard_ns, answered_ns, back_ns))
            else:
                answer = pack_object((host, back_ns, now_ns()))
                transport.send(answer, target=rank, tag=_CLOCK)
    transport.flush()
    if transport.rank == 0:
        return ClockOffset(0, 0)
    estimate = estimate_offset(exchanges)
    is_shared = host == leader_host and abs(estimate.offset_ns) <= estimate.error_ns
    return ClockOffset(0, 0) if is_shared else estimate
