"""What a message occupies while it travels: the ports of devices, and the links that hosts share.

A message of ``n`` bytes over a link takes ``latency_s + n / bandwidth`` seconds, in which it has
its channels for itself; others that need one of them wait in the order in which they were ready.

- Every message occupies the port through which its device sends (``"gpu0 out"``): a device sends
  its messages one after the other. Messages of different senders reach a device side by side.
- Over a half-duplex link it also occupies the direction back: the port is one channel (``"gpu0"``)
  for what its device sends and receives.
- Over a shared link (``Link.is_shared``) it occupies the channel of the host as well: the one bus
  in it (``"host0 bus"``), or its network port on the way out of one host and into the other
  (``"host0 out"``, ``"host1 in"``; one channel ``"host0 net"`` each where the link is half duplex).
- What the feed sends leaves through a port of its own (``"gpu0 feed"``), as the runtime hands all
  of it over at the start of a step. So do sums of gradients (``"gpu0 sums"``), which run on streams
  of their own beside the messages: a message does not wait for the end of a long sum. That both
  share the bandwidth meanwhile is left out.
"""

from __future__ import annotations

from lightning_gpp.cluster.cluster import Cluster


def channels(
    cluster: Cluster, source: int, target: int, *, is_feed: bool = False, is_sum: bool = False
) -> tuple[str, ...]:
    """The channels of a message from one device to another.

    Args:
        cluster: the devices and their links.
        source: the sending device.
        target: the receiving device.
        is_feed: whether the feed sends it.
        is_sum: whether it is a part of a sum of gradients.

    Raises:
        ValueError: there is no such device, or both are the same.

    >>> from lightning_gpp.cluster import uniform_cluster
    >>> channels(uniform_cluster(2), 0, 1)
    ('cpu:0 out',)
    """
    link = cluster.link(source, target)
    sender, receiver = cluster.devices[source], cluster.devices[target]
    if is_feed:
        found = [f"{sender.name} feed"]
    elif link.is_full_duplex:
        found = [f"{sender.name} sums" if is_sum else f"{sender.name} out"]
    else:
        found = [f"{end.name} sums" if is_sum else end.name for end in (sender, receiver)]
    if link.is_shared and sender.host == receiver.host:
        found.append(f"{sender.host} bus")
    elif link.is_shared and link.is_full_duplex:
        found += [f"{sender.host} out", f"{receiver.host} in"]
    elif link.is_shared:
        found += [f"{sender.host} net", f"{receiver.host} net"]
    return tuple(found)
