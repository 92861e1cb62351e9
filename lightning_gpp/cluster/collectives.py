"""Estimated seconds of an all-reduce, from the links between its devices.

With ``d`` devices and ``n`` bytes, messages in the alpha-beta model:

- *ring*: ``2 (d - 1)`` rounds in which every device sends ``n / d`` bytes to the next one; the
  least bytes per device that any algorithm can do with (Patarasuk and Yuan, "Bandwidth optimal
  all-reduce algorithms for clusters of workstations", JPDC 2009). Between hosts whose devices have
  network adapters of their own (:attr:`Link.is_per_device`) as many rings share the bytes, each of
  which leaves a host by another adapter, as NCCL does it.
- *tree*: ``ceil(log2 d)`` rounds up a binomial tree and as many down, each with all ``n`` bytes;
  few rounds, so that small sums over many devices are fast (Thakur, Rabenseifner and Gropp,
  "Optimization of collective communication operations in MPICH", IJHPCA 2005: reduce, then
  broadcast).

The additions themselves are taken as free. A round takes as long as its slowest message; messages
of one round that need the same channel (:func:`lightning_gpp.cluster.channels`: shared links,
half-duplex ports) follow one another.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from lightning_gpp.cluster.cluster import Cluster, Link, channels

BUCKET_BYTES = 4 * 2**20
"""Gradients are summed in buckets; one is closed when it has this many bytes."""

Pairs = Sequence[tuple[int, int]]


def all_reduce_s(cluster: Cluster, devices: Sequence[int], size_bytes: float) -> float:
    """Seconds of a ring that sums ``size_bytes`` over devices so that all of them have the sum.

    Args:
        cluster: the links.
        devices: in the order of the ring.
        size_bytes: on every device.

    >>> from lightning_gpp.cluster import Link, uniform_cluster
    >>> cluster = uniform_cluster(4, Link(bandwidth_bytes_per_s=1e9, latency_s=0.001))
    >>> all_reduce_s(cluster, [0, 1, 2, 3], 4_000_000), all_reduce_s(cluster, [0, 1], 0)
    (0.012, 0.0)
    """
    if len(devices) < 2 or not size_bytes:
        return 0.0
    return max(a + b * size_bytes for a, b in ring_lines(cluster, devices))


def tree_all_reduce_s(cluster: Cluster, devices: Sequence[int], size_bytes: float) -> float:
    """The same by a tree, whose root is the first device.

    >>> from lightning_gpp.cluster import Link, uniform_cluster
    >>> cluster = uniform_cluster(4, Link(bandwidth_bytes_per_s=1e9, latency_s=0.001))
    >>> tree_all_reduce_s(cluster, [0, 1, 2, 3], 4_000_000)
    0.02
    """
    rounds = [[(t, s) for s, t in up] if down else up for up in _tree(devices) for down in (0, 1)]
    return rounds_s(cluster, rounds, size_bytes)


def ring_lines(cluster: Cluster, devices: Sequence[int]) -> tuple[tuple[float, float], ...]:
    """Seconds of a ring all-reduce of at least a byte: the largest of some lines over the bytes.

    Args:
        cluster: the links.
        devices: in the order of the ring.

    Returns:
        Of every channel that takes longest at some size: seconds at least, and seconds per byte.
    """
    if len(devices) < 2:
        return ((0.0, 0.0),)
    rounds = 2 * (len(devices) - 1)
    links = [cluster.link(*pair) for pair in _ring(devices)]
    if (rings := _num_rings(cluster, devices, links)) > 1:
        latency_s = max(link.latency_s for link in links)
        slowest = max(
            (1 if link.is_per_device else rings - 1) / link.bandwidth_bytes_per_s for link in links
        )
        return ((rounds * latency_s, rounds * slowest / rings / len(devices)),)
    busy: defaultdict[str, list[Link]] = defaultdict(list)
    for (source, target), link in zip(_ring(devices), links, strict=True):
        for channel in channels(cluster, source, target):
            busy[channel].append(link)
    lines = {
        (
            rounds * sum(link.latency_s for link in links),
            rounds * sum(1 / link.bandwidth_bytes_per_s for link in links) / len(devices),
        )
        for links in busy.values()
    }
    return tuple(
        line
        for line in sorted(lines)
        if not any(o != line and o[0] >= line[0] and o[1] >= line[1] for o in lines)
    )


def _num_rings(cluster: Cluster, devices: Sequence[int], links: Sequence[Link]) -> int:
    """How many adapters every host of a ring has for it; 1 if hosts differ, or share one."""
    runs = Counter(cluster.devices[device].host for device in devices)
    is_railed = len(runs) == sum(link.is_per_device for link in links)
    return min(runs.values()) if is_railed and len(set(runs.values())) == 1 else 1


def all_reduce_channels(cluster: Cluster, devices: Sequence[int]) -> tuple[str, ...]:
    """The channels that a ring all-reduce occupies, each once."""
    pairs = _ring(devices) if len(devices) > 1 else []
    found = (channel for pair in pairs for channel in channels(cluster, *pair, is_sum=True))
    return tuple(dict.fromkeys(found))


def _ring(devices: Sequence[int]) -> Pairs:
    return list(zip(devices, (*devices[1:], devices[0]), strict=True))


def _tree(devices: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """The messages of every round up a binomial tree.

    >>> [list(pairs) for pairs in _tree([0, 1, 2, 3, 4])]
    [[(1, 0), (3, 2)], [(2, 0)], [(4, 0)]]
    """
    distance = 1
    while distance < len(devices):
        children = range(distance, len(devices), 2 * distance)
        yield [(devices[child], devices[child - distance]) for child in children]
        distance *= 2


def rounds_s(cluster: Cluster, rounds: Iterable[Pairs], size_bytes: float) -> float:
    """Seconds of rounds of messages, one round after the other.

    Messages of a round go at the same time as far as their channels allow.

    Args:
        cluster: the links.
        rounds: the messages of each, as source and target.
        size_bytes: of every message.
    """
    total_s = 0.0
    for pairs in rounds:
        busy_s: defaultdict[str, float] = defaultdict(float)
        for source, target in pairs:
            message_s = cluster.link(source, target).transfer_s(size_bytes)
            for channel in channels(cluster, source, target):
                busy_s[channel] += message_s
        total_s += max(busy_s.values())
    return total_s
