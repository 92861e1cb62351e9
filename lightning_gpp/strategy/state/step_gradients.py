"""Averages gradients over pipelines, and shares gradients that the user's own code adds.

The step may use a parameter beside the pipelined forward: a penalty on a weight, a tied embedding.
Autograd then adds to its gradient on rank 0. Where other ranks hold a copy of the parameter
(replicas of its stage, other stages that share it), theirs has to be the same before the optimizer
steps (:class:`OwnGradients`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_gpp.runtime.processes.peers import Peers

_PURPOSE = "averaging gradients over the pipelines"


def average_gradients(
    parameters: Sequence[Parameter], peers: Peers, *, is_asked_to_end: bool
) -> bool:
    """All peers: gradients become their mean over the pipelines.

    A parameter that has none in one pipeline counts there as one of zeros; one that has none
    anywhere still has none.

    Args:
        parameters: that this rank and its peers hold, in one order.
        peers: this rank in the other pipelines.
        is_asked_to_end: whether this pipeline is.

    Returns:
        Whether any pipeline is asked to end, which all know after this.

    Raises:
        NotImplementedError: a gradient is sparse.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in trained:
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise NotImplementedError(
                f"a gradient of shape {tuple(parameter.shape)} is sparse, which is not averaged "
                "over pipelines; use sparse=False in the embedding, or pipelines=1"
            )
    told = [is_asked_to_end, *(parameter.grad is not None for parameter in trained)]
    known = peers.reduced(torch.tensor(told, dtype=torch.int), dist.ReduceOp.MAX, _PURPOSE)
    ends, *exist = known.tolist()
    for parameter, is_there in zip(trained, exist, strict=True):
        if is_there and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    peers.mean_([p.grad for p in trained if p.grad is not None], _PURPOSE)
    return bool(ends)


class OwnGradients:
    """Notices, on rank 0, gradients that the step adds to parameters which other ranks hold too.

    Args:
        shared: the parameters that this rank and others hold, by name.
    """

    def __init__(self, shared: Mapping[str, Parameter]) -> None:
        self._shared = shared
        self._touched: set[str] = set()
        self.note()

    def note(self) -> None:
        """What the gradients are now, they are on all ranks; but for those seen to differ."""
        self._known = self._now()

    def look(self) -> None:
        """Sees which gradients have changed since they were noted; a cleared one is so on all."""
        for name, now in self._now().items():
            known = self._known[name]
            if now is None:
                self._touched.discard(name)
            elif known is None or now[0] is not known[0] or now[1] != known[1]:
                self._touched.add(name)

    def _now(self) -> dict[str, tuple[ref[Tensor], int] | None]:
        """The gradients, which this does not keep, and how often they have changed."""
        return {
            name: None if p.grad is None else (ref(p.grad), p.grad._version)
            for name, p in self._shared.items()
        }

    def take(self) -> dict[str, Tensor]:
        """The gradients that others have to take over."""
        self.look()
        touched, self._touched = self._touched, set()
        self.note()
        found = {name: self._shared[name].grad for name in sorted(touched)}
        return {name: gradient for name, gradient in found.items() if gradient is not None}
