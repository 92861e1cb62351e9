"""Messages that take their emulated time, over any real transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from lightning_gpp.emulation.rank import EmulatedRank
from lightning_gpp.runtime.payload import Payload
from lightning_gpp.runtime.transport.transport import Tag, Transport


class EmulatedTransport:
    """A :class:`~lightning_gpp.runtime.transport.transport.Transport` for the messages of programs.

    Really, a message comes as fast as it can. It carries the moment of its emulated arrival along,
    as one more tensor, and the receiver waits until then.

    Args:
        inner: moves the messages.
        rank: the emulated rank that uses it.
        rank_of_device: rank of every device of the plan.

    Attributes:
        rank: number of this rank.
        num_ranks: how many can talk to each other.
    """

    def __init__(self, inner: Transport, rank: EmulatedRank, rank_of_device: Sequence[int]) -> None:
        self._inner = inner
        self._emulated = rank
        self._rank_of_device = rank_of_device
        self.rank, self.num_ranks = inner.rank, inner.num_ranks

    def send(self, payload: Payload, *, target: int, tag: Tag) -> None:
        """Hands a message over; it leaves when its channels are free."""
        arrival_s = self._emulated.send(tag, self._rank_of_device.index(target))
        stamp = torch.tensor(arrival_s, dtype=torch.float64, device="cpu")
        stamped = replace(
            payload,
            tensors=[*payload.tensors, stamp],
            requires_grad=[*payload.requires_grad, False],
        )
        self._inner.send(stamped, target=target, tag=tag)

    def receive(self, *, source: int, tag: Tag, timeout_s: float, purpose: str) -> Payload:
        """Waits for a message, and until its emulated arrival."""
        stamped = self._inner.receive(source=source, tag=tag, timeout_s=timeout_s, purpose=purpose)
        stamp = stamped.tensors[-1]
        assert stamp is not None, "the last tensor is the arrival"
        self._emulated.wait_until(stamp.item())
        return replace(
            stamped, tensors=stamped.tensors[:-1], requires_grad=stamped.requires_grad[:-1]
        )

    def flush(self) -> None:
        """Waits until everything sent so far has left."""
        self._inner.flush()

    def close(self) -> None:
        """Ends the transport in good order."""
        self._inner.close()
