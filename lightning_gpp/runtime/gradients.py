"""Keeps gradients of a program apart from those that parameters already have.

A program's gradients are summed over the replicas of a stage; what was accumulated before it must
not be summed once more. So ``p.grad`` is put aside while a program's backwards run, and their
gradients are added to it afterwards.

Where the user's step runs for every micro-batch, forward and backward are over when it returns,
but the host loop (Lightning's) clears gradients after the step and before ``loss.backward()``, may
divide the loss, scale it, accumulate several steps and clip. There the gradients are handed out by
the backward of the loss that the step returns, times the gradient that arrives there: exact,
because gradients are linear in it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

from torch import Tensor
from torch.nn import Parameter

_gradient = operator.attrgetter("grad")


class GradientStash:
    """Collects the gradients of a program, and adds them to the parameters at its end.

    Args:
        parameters: the parameters of this rank, each once.
        loss_scale: what the losses of the program are multiplied by. In float16 a gradient may be
            too small without it; they are divided by it when they are handed out.

    Example: ``with stash: run the program``, then ``stash.hand_out()``.
    """

    def __init__(self, parameters: Iterable[Parameter], loss_scale: float = 1.0) -> None:
        self._parameters = list(parameters)
        self.loss_scale = loss_scale
        self._before: list[tuple[Parameter, Tensor]] = []
        self._stash: list[tuple[Parameter, Tensor]] | None = None

    def __enter__(self) -> GradientStash:
        self._before = self._taken()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stash = self._taken()
        for parameter, before in self._before:
            parameter.grad = before
        self._before = []

    def _taken(self) -> list[tuple[Parameter, Tensor]]:
        """The gradients that there are, with their parameters, which have none afterwards."""
        pairs = zip(self._parameters, map(_gradient, self._parameters), strict=True)
        taken = [pair for pair in pairs if pair[1] is not None]
        for parameter, _ in taken:
            parameter.grad = None
        return taken

    def loss(self, value: Tensor) -> Tensor:
        """A loss with this value whose backward hands the stashed gradients out."""
        return loss_that_calls(value, lambda gradient: self.hand_out(gradient / self.loss_scale))

    def discard(self) -> None:
        """Forgets the stashed gradients."""
        self._stash = None

    def hand_out(self, factor: Tensor | None = None) -> None:
        """Adds the stashed gradients, times ``factor`` if there is one, to ``p.grad``.

        Raises:
            RuntimeError: they were handed out already.
        """
        if self._stash is None:
            raise RuntimeError(
                "backward was called twice on the loss of one pipelined step; with the schedule "
                "'1f1b' its gradients exist only once. Call it once per training_step, or use "
                "schedule='gpipe'."
            )
        stash, self._stash = self._stash, None
        is_one = factor is None or (factor.device.type == "cpu" and factor.item() == 1)
        for parameter, gradient in stash:
            if not is_one:
                assert factor is not None
                gradient = gradient * factor.to(gradient)
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)


def loss_that_calls(value: Tensor, call: Callable[[Tensor], object]) -> Tensor:
    """A loss with this value, whose backward calls a function with the gradient that arrives."""

    def called(gradient: Tensor) -> None:
        call(gradient)

    leaf = value.detach().requires_grad_()
    leaf.register_hook(called)  # type: ignore[no-untyped-call]
    return leaf.clone()
