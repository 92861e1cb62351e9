"""Sums gradients by messages to the first rank: of what stages share, and sparse ones of replicas.

A message takes what there is; replicas do not know of each other which rows of a table they used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn import Parameter

from lightning_gpp.runtime.payload import Payload, pack, unpack
from lightning_gpp.runtime.transport.transport import Tag, Transport

SHARED_GRADIENTS = -2
"""First number of the tags of messages with gradients."""


def sum_shared(
    parameters: Sequence[Parameter],
    ranks: Sequence[int],
    number: int,
    transport: Transport,
    receive: Callable[[int, Tag], Payload],
) -> None:
    """The first of the ranks adds up the gradients and answers with the sum.

    Args:
        parameters: the same on all of the ranks.
        ranks: those that hold it.
        number: of the sum, for the tags.
        transport: of this rank.
        receive: receives a message from a rank.
    """
    up: Tag = (SHARED_GRADIENTS, number, 0, 0)
    down: Tag = (SHARED_GRADIENTS, number, 1, 0)
    gradients: list[Tensor | None] = [parameter.grad for parameter in parameters]
    if transport.rank != ranks[0]:
        transport.send(pack(gradients), target=ranks[0], tag=up)
        gradients = unpack(receive(ranks[0], down))
    else:
        for rank in ranks[1:]:
            gradients = _added(gradients, unpack(receive(rank, up)))
        for rank in ranks[1:]:
            transport.send(pack(gradients), target=rank, tag=down)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _added(
    gradients: Sequence[Tensor | None], others: Sequence[Tensor | None]
) -> list[Tensor | None]:
    return [
        other if own is None else own if other is None else own + other
        for own, other in zip(gradients, others, strict=True)
    ]
