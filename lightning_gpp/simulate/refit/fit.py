"""Lines through recorded seconds: what a message costs by its bytes."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from lightning_gpp.cluster import Cluster, Link
from lightning_gpp.simulate.program_costs import Overhead
from lightning_gpp.simulate.refit.recorded import Message

Point = tuple[float, float]
"""Bytes, and recorded seconds of something with so many."""

UNSEEN_BYTES_PER_S = 1e12
"""Bandwidth of a link on which more bytes took no longer, where it is not taken for more."""


def fit_overhead(points: Iterable[Point]) -> Overhead:
    """The line ``fixed_s + per_byte_s * bytes`` through recorded seconds, not negative.

    The slope is that of the medians of every number of bytes, so that single slow messages do not
    tilt it; the line passes through the mean of all points, so that their sum is kept.

    >>> fit_overhead([(10, 3.0), (30, 4.0)])
    Overhead(fixed_s=2.5, per_byte_s=0.05)
    >>> fit_overhead([(10, 3.0), (10, 4.0)])  # one size does not show a slope
    Overhead(fixed_s=3.5, per_byte_s=0.0)
    """
    seconds: defaultdict[float, list[float]] = defaultdict(list)
    for size_bytes, taken_s in points:
        seconds[size_bytes].append(taken_s)
    if not seconds:
        return Overhead()
    slope = 0.0
    if len(seconds) > 1:
        medians = [statistics.median(found) for found in seconds.values()]
        slope = max(0.0, statistics.linear_regression(list(seconds), medians).slope)
    mean_s = statistics.fmean(s for found in seconds.values() for s in found)
    mean_bytes = statistics.fmean(size for size, found in seconds.items() for _ in found)
    if slope * mean_bytes > mean_s:  # the line would begin below 0
        return Overhead(0.0, mean_s / mean_bytes)
    return Overhead(mean_s - slope * mean_bytes, slope)


def fit_receive(steps: Sequence[Sequence[Message]]) -> Overhead:
    """What receiving costs the receiver of a message that is there already.

    Those messages show it that were asked for so late that even the slowest one would have been
    there, one after another behind those that were on their way when it was sent. Where all were
    waited for, nothing can be told from the transfer, which gets it all.
    """
    waited_s = (m.received_s - m.sent_s for found in steps for m in found if m.asked_s <= m.sent_s)
    slowest_s = max(waited_s, default=0.0)
    return fit_overhead(
        (m.size_bytes, m.received_s - m.asked_s)
        for found in steps
        for m in found
        if m.asked_s > m.sent_s and m.asked_s >= m.sent_s + slowest_s * (1 + len(_ahead(m, found)))
    )


def fit_links(
    steps: Sequence[Sequence[Message]], receive: Overhead, cluster: Cluster
) -> dict[str, Link]:
    """The links of every level that messages show: ``"host"``, ``"rack"``, ``"spine"``.

    Those messages show it that were waited for. Those that shared a device with another one on its
    way are left out: they may have queued.

    Args:
        steps: the messages of every step.
        receive: what receiving costs besides.
        cluster: its links as they were taken for.
    """
    points: defaultdict[str, list[Point]] = defaultdict(list)
    links: dict[str, Link] = {}
    for found in steps:
        for m in found:
            if m.asked_s <= m.sent_s and not _ahead(m, found):
                one, other = cluster.devices[m.source], cluster.devices[m.target]
                within = "host" if one.host == other.host else "rack"
                level = within if one.rack == other.rack else "spine"
                links.setdefault(level, cluster.link(m.source, m.target))
                waited_s = m.received_s - m.sent_s - receive.seconds(m.size_bytes)
                points[level].append((m.size_bytes, max(0.0, waited_s)))
    return {level: _fitted(links[level], points[level]) for level in sorted(links)}


def _fitted(link: Link, points: Sequence[Point]) -> Link:
    """A link through recorded seconds.

    Its bandwidth stays where all messages have one size, unless they were quicker than that.
    """
    line, sizes = fit_overhead(points), {size_bytes for size_bytes, _ in points}
    if len(sizes) == 1:
        latency_s = line.fixed_s - min(sizes) / link.bandwidth_bytes_per_s
        if latency_s >= 0:
            return replace(link, latency_s=latency_s)
        line = Overhead(0.0, line.fixed_s / min(sizes))
    bytes_per_s = max(UNSEEN_BYTES_PER_S, link.bandwidth_bytes_per_s)
    if line.per_byte_s * bytes_per_s > 1:
        bytes_per_s = 1 / line.per_byte_s
    return replace(link, latency_s=line.fixed_s, bandwidth_bytes_per_s=bytes_per_s)


def _ahead(message: Message, others: Sequence[Message]) -> list[Message]:
    """Messages from or to the same devices that were on their way when it was sent."""
    return [
        other
        for other in others
        if other is not message
        and (other.source == message.source or other.target == message.target)
        and other.sent_s <= message.sent_s < other.received_s
    ]
