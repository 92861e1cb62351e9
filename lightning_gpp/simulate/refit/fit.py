"""Lines through recorded seconds: what a message costs by its bytes."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lightning_gpp.cluster import Cluster, Link
from lightning_gpp.simulate.program_costs import Overhead
from lightning_gpp.simulate.refit.recorded import Message


@dataclass(frozen=True, slots=True)
class Point:
    """Recorded seconds of something with so many bytes."""

    size_bytes: float
    seconds: float


def fit_overhead(points: Sequence[Point]) -> Overhead:
    """The line ``fixed_s + per_byte_s * bytes`` through recorded seconds, not negative.

    The slope is that of the medians of every number of bytes, so that single slow messages do not
    tilt it; the line passes through the mean of all points, so that their sum is kept.

    >>> fit_overhead([Point(10, 3.0), Point(30, 4.0)])
    Overhead(fixed_s=2.5, per_byte_s=0.05)
    >>> fit_overhead([Point(10, 3.0), Point(10, 4.0)])  # one size does not show a slope
    Overhead(fixed_s=3.5, per_byte_s=0.0)
    """
    if not points:
        return Overhead()
    slope = max(0.0, _slope(points))
    mean_s = statistics.fmean(point.seconds for point in points)
    mean_bytes = statistics.fmean(point.size_bytes for point in points)
    if slope * mean_bytes > mean_s:  # the line would begin below 0
        return Overhead(0.0, mean_s / mean_bytes)
    return Overhead(mean_s - slope * mean_bytes, slope)


def _slope(points: Sequence[Point]) -> float:
    """Least squares through the medians of every number of bytes; 0 for a single number."""
    seconds: defaultdict[float, list[float]] = defaultdict(list)
    for point in points:
        seconds[point.size_bytes].append(point.seconds)
    if len(seconds) < 2:
        return 0.0
    medians = {size: statistics.median(found) for size, found in seconds.items()}
    return statistics.linear_regression(list(medians), list(medians.values())).slope


def fit_send(steps: Sequence[Sequence[Message]]) -> Overhead:
    """What sending costs the sender."""
    return fit_overhead([Point(m.size_bytes, m.send_s) for found in steps for m in found])


def fit_receive(steps: Sequence[Sequence[Message]]) -> Overhead:
    """What receiving costs the receiver of a message that is there already.

    Those messages show it that were asked for so late that even the slowest one would have been
    there, one after another behind those that were on their way when it was sent. Where all were
    waited for, nothing can be told from the transfer, which gets it all.
    """
    all_messages = [message for found in steps for message in found]
    slowest_s = max(
        (m.received_s - m.sent_s for m in all_messages if m.asked_s <= m.sent_s), default=0.0
    )
    late = [
        message
        for found in steps
        for message in found
        if message.asked_s > message.sent_s
        and message.asked_s >= message.sent_s + slowest_s * (1 + len(_ahead(message, found)))
    ]
    return fit_overhead([Point(m.size_bytes, m.received_s - m.asked_s) for m in late])


def fit_link(
    steps: Iterable[Sequence[Message]], receive: Overhead, link: Link, ends: set[tuple[int, int]]
) -> Link | None:
    """The link that messages took, from those that were waited for.

    Messages that shared a device with another one on its way are left out: they may have queued.

    Args:
        steps: the messages of every step.
        receive: what receiving costs besides.
        link: as it was taken for; its bandwidth stays where all messages have one size, unless they
            were quicker than that.
        ends: (source, target) of the messages that count.

    Returns:
        None where no message shows it.
    """
    points = [
        Point(m.size_bytes, max(0.0, m.received_s - m.sent_s - receive.seconds(m.size_bytes)))
        for found in steps
        for m in found
        if (m.source, m.target) in ends and m.asked_s <= m.sent_s and not _ahead(m, found)
    ]
    if not points:
        return None
    line = fit_overhead(points)
    if len({point.size_bytes for point in points}) == 1:
        rest_s, size_bytes = line.fixed_s, points[0].size_bytes
        latency_s = rest_s - size_bytes / link.bandwidth_bytes_per_s
        if latency_s >= 0:
            return replace(link, latency_s=latency_s)
        line = Overhead(0.0, rest_s / size_bytes)
    bytes_per_s = max(_UNSEEN_BYTES_PER_S, link.bandwidth_bytes_per_s)
    if line.per_byte_s * bytes_per_s > 1:
        bytes_per_s = 1 / line.per_byte_s
    return replace(link, latency_s=line.fixed_s, bandwidth_bytes_per_s=bytes_per_s)


_UNSEEN_BYTES_PER_S = 1e12
"""Bandwidth of a link on which more bytes took no longer, where it is not taken for more."""


def _ahead(message: Message, others: Sequence[Message]) -> list[Message]:
    """Messages from or to the same devices that were on their way when it was sent."""
    return [
        other
        for other in others
        if other is not message
        and (other.source == message.source or other.target == message.target)
        and other.sent_s <= message.sent_s < other.received_s
    ]


def fit_links(
    steps: Sequence[Sequence[Message]], receive: Overhead, cluster: Cluster
) -> dict[str, Link]:
    """The links of every level that messages show: ``"host"``, ``"rack"``, ``"spine"``."""
    levels: defaultdict[str, set[tuple[int, int]]] = defaultdict(set)
    for found in steps:
        for message in found:
            levels[level(cluster, message.source, message.target)].add(
                (message.source, message.target)
            )
    fitted = {}
    for name, ends in sorted(levels.items()):
        known = cluster.link(*min(ends))
        link = fit_link(steps, receive, known, ends)
        if link is not None:
            fitted[name] = link
    return fitted


def level(cluster: Cluster, source: int, target: int) -> str:
    """What a message crosses: a host, a rack, or the spine between racks."""
    one, other = cluster.devices[source], cluster.devices[target]
    if one.rack != other.rack:
        return "spine"
    return "host" if one.host == other.host else "rack"
