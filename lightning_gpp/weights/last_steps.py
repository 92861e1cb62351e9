r"""What the last update of an optimizer did to its parameters, from its state or from a copy.

PipeOptim (arXiv 2312.00839, section 3) predicts the weights of ``s`` updates ahead as

.. math:: \hat W_{t+s} = W_t - \mathit{lr} \cdot s \cdot \Delta W_t

where :math:`\Delta W_t` is what the last completed update subtracted, but for the learning rate.
For SGD with momentum that is the momentum buffer; for Adam and AdamW the corrected first moment
over the root of the second (the decay of AdamW is left out); for RMSprop with momentum its buffer.
These are in the optimizer's state. What other optimizers did (SGD without momentum or with
Nesterov's, Adagrad, NAdam, RAdam, any of a user's own) is measured: the parameters before the
update, minus those after it. It is the same quantity, so the definition holds for every optimizer,
clipping, decay and parameter groups included, and costs one more copy of the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

Group = Mapping[str, Any]
State = Mapping[Tensor, Mapping[str, Any]]
Rule = Callable[[Group, Sequence[Tensor], State], "_Steps"]


class _Steps(NamedTuple):
    """What an update subtracted: ``factors * directions / (roots of squares + added)``.

    Without squares, ``factors * directions``.
    """

    directions: Sequence[Tensor]
    factors: Sequence[float]
    squares: Sequence[Tensor] = ()
    added: Sequence[float] = ()


def _momentum_buffers(group: Group, parameters: Sequence[Tensor], state: State) -> _Steps:
    buffers = [state[parameter]["momentum_buffer"] for parameter in parameters]
    return _Steps(buffers, [_signed_lr(group)] * len(buffers))


def _adam(group: Group, parameters: Sequence[Tensor], state: State) -> _Steps:
    r"""With :math:`m / (1 - \beta_1^t)` over :math:`\sqrt{v / (1 - \beta_2^t)} + \epsilon`.

    Both sides are multiplied by :math:`\sqrt{1 - \beta_2^t}`, which saves one pass over the memory.
    """
    first_decay, second_decay = group["betas"]
    second = "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"
    counts = [float(state[parameter]["step"]) for parameter in parameters]
    corrections = [math.sqrt(1 - second_decay**count) for count in counts]
    factors = [
        _signed_lr(group) * correction / (1 - first_decay**count)
        for correction, count in zip(corrections, counts, strict=True)
    ]
    return _Steps(
        [state[parameter]["exp_avg"] for parameter in parameters],
        factors,
        [state[parameter][second] for parameter in parameters],
        [group["eps"] * correction for correction in corrections],
    )


def _signed_lr(group: Group) -> float:
    return -float(group["lr"]) if group.get("maximize") else float(group["lr"])


def _rule(kind: type[Optimizer], group: Group) -> Rule | None:
    """How the last step follows from the state; None where it does not.

    Sub-classes may step otherwise, so only the classes themselves are known.
    """
    if kind is SGD and group["momentum"] and not group["nesterov"]:
        return _momentum_buffers
    if kind is RMSprop and group["momentum"]:
        return _momentum_buffers
    return _adam if kind in (Adam, AdamW) else None


class LastSteps:
    """Watches one optimizer.

    Args:
        optimizer: it is stepped by its owner.
        are_asked_for: whether its last steps are; otherwise none is measured.

    Attributes:
        before_update: called before every update.
    """

    def __init__(self, optimizer: Optimizer, *, are_asked_for: bool = True) -> None:
        self._optimizer = optimizer
        self._are_asked_for = are_asked_for
        self.before_update: list[Callable[[], None]] = []
        self._before: dict[Tensor, Tensor] = {}
        self._measured: dict[Tensor, tuple[Tensor, float]] = {}
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._compare),
        ]

    def predicted(
        self, parameters: Iterable[Tensor], ahead: int, into: Mapping[Tensor, Tensor] | None = None
    ) -> dict[Tensor, Tensor]:
        """Parameters some updates ahead, as if each did what the last one did.

        Those that it has not updated yet are left out. With the learning rate of now, which a
        schedule may have changed since.

        Args:
            parameters: of any optimizer.
            ahead: how many updates.
            into: parameter -> the tensor that its prediction is written into; new ones if not
                given.
        """
        wanted, found = set(parameters), dict[Tensor, Tensor]()
        for group in self._optimizer.param_groups:
            own = [p for p in group["params"] if p in wanted]
            known = self._known(group, own)
            if known:
                steps = self._last(group, known)
                values = [parameter.detach() for parameter in known]
                if into is None:
                    found |= zip(known, _moved(values, steps, -ahead), strict=True)
                    continue
                targets = [into[parameter] for parameter in known]
                _move_into(targets, values, steps, -ahead)
                found |= zip(known, targets, strict=True)
        return found

    def _known(self, group: Group, own: Sequence[Tensor]) -> Sequence[Tensor]:
        """Parameters of a group that have been updated."""
        if _rule(type(self._optimizer), group) is None:
            return [parameter for parameter in own if parameter in self._measured]
        return [p for p in own if _has_stepped(self._optimizer.state.get(p))]

    def _last(self, group: Group, known: Sequence[Tensor]) -> _Steps:
        """What the last update subtracted from parameters of a group."""
        if (rule := _rule(type(self._optimizer), group)) is not None:
            return rule(group, known, self._optimizer.state)
        factors = [self._scale(parameter, group) for parameter in known]
        return _Steps([self._measured[parameter][0] for parameter in known], factors)

    def forget(self) -> None:
        """Forgets what was measured, as whoever resumes does not know it."""
        self._measured.clear()

    def close(self) -> None:
        """Watches no more."""
        for hook in self._hooks:
            hook.remove()

    def _scale(self, parameter: Tensor, group: Group) -> float:
        """The learning rate of now over that of the step that was measured."""
        lr, now = self._measured[parameter][1], float(group["lr"])
        return now / lr if lr else 1.0

    def _unknown(self) -> list[tuple[Tensor, float]]:
        """Parameters that are about to be updated, whose steps do not follow from the state."""
        return [
            (parameter, float(group["lr"]))
            for group in self._optimizer.param_groups
            if self._are_asked_for and _rule(type(self._optimizer), group) is None
            for parameter in group["params"]
            if parameter.grad is not None
        ]

    def _before_step(self, _: Optimizer, args: Any, kwargs: Any) -> Any:
        """The update begins now; or when the closure has run that makes the gradients."""
        closure = kwargs.get("closure") or next(iter(args[1:]), None)
        if closure is None:
            self._keep()
            return None

        def then_keep() -> Any:
            result = closure()
            self._keep()
            return result

        return args[:1], {**kwargs, "closure": then_keep}

    def _keep(self) -> None:
        for notify in self.before_update:
            notify()
        self._before = {parameter: parameter.detach().clone() for parameter, _ in self._unknown()}

    def _compare(self, *_: Any) -> None:
        for parameter, lr in self._unknown():
            if parameter in self._before:
                step = self._before.pop(parameter).sub_(parameter.detach())
                self._measured[parameter] = step, lr
        self._before = {}


def _has_stepped(state: Mapping[str, Any] | None) -> bool:
    return any((state or {}).get(name) is not None for name in ("momentum_buffer", "exp_avg"))


def _moved(values: Sequence[Tensor], steps: _Steps, times: int) -> Sequence[Tensor]:
    """Values plus a step some times, as new tensors; few kernels for many parameters."""
    factors = [times * factor for factor in steps.factors]
    directions = list(steps.directions)
    if steps.squares:
        roots = torch._foreach_sqrt(list(steps.squares))
        torch._foreach_add_(roots, list(steps.added))
        return torch._foreach_addcdiv(list(values), directions, roots, factors)
    if len(set(factors)) == 1:
        return torch._foreach_add(list(values), directions, alpha=factors[0])
    return torch._foreach_add(list(values), torch._foreach_mul(directions, factors))


_IN_CACHE = 2**17
"""Elements that are worked on at a time, so that what is needed twice stays in a core's cache."""


def _move_into(
    targets: Sequence[Tensor], values: Sequence[Tensor], steps: _Steps, times: int
) -> None:
    """The same into tensors that are there, for processors.

    New memory costs them more than the arithmetic does.
    """
    if not steps.squares:
        for target, value, direction, factor in zip(
            targets, values, steps.directions, steps.factors, strict=True
        ):
            torch.add(value, direction, alpha=times * factor, out=target)
        return
    for number, tensors in enumerate(zip(targets, values, steps.directions, steps.squares)):
        added, factor = steps.added[number], times * steps.factors[number]
        for target, value, direction, square in _pieces(tensors):
            root = square.sqrt().add_(added)
            torch.addcdiv(value, direction, root, value=factor, out=target)


def _pieces(tensors: Sequence[Tensor]) -> Iterable[Sequence[Tensor]]:
    """Tensors of one shape piece by piece; as they are where their memory has gaps."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        return [tensors]
    return zip(*(torch.split(tensor.view(-1), _IN_CACHE) for tensor in tensors), strict=True)
