"""Gradients that the user's step gives to parameters beside the pipelined forward.

The step may use a parameter itself: a penalty on a weight, a tied embedding. Autograd then adds to
its gradient on rank 0. Where other ranks hold a copy of the parameter (replicas of its stage, other
stages that share it), theirs has to be the same before the optimizer steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from weakref import ref

from torch import Tensor
from torch.nn import Parameter


class OwnGradients:
    """Notices on rank 0 what the step adds to the gradients of parameters on several ranks.

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
