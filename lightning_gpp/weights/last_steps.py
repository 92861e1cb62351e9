r"""The last update that an optimizer made, from a copy of the weights or from its state.

PipeOptim (arXiv 2312.00839, section 3) predicts the weights of ``s`` updates ahead as

.. math:: \hat W_{t+s} = W_t - \mathit{lr} \cdot s \cdot \Delta W_t

where :math:`\Delta W_t` is what the last completed update subtracted, but for the learning rate.
So :math:`\mathit{lr} \cdot \Delta W_t = W_{t-1} - W_t`, whatever the optimizer, its decay, its
parameter groups and clipping: the parameters before every update are kept, and the prediction is
written over them, in one pass over the memory and with one copy of the parameters for both.

Whoever resumes does not know the parameters before the last update. They follow from the state of
Adam, AdamW, and SGD and RMSprop with momentum; with other optimizers nothing is predicted until the
next update.
The paper leaves AdamW's decay out of the prediction; here it is in it, as it is in the update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from lightning_gpp.common.host_copies import Originals

Group = Mapping[str, Any]


@dataclass(slots=True)
class _AsKept:
    """The parameter some updates ahead, as if each did what the last one did.

    Attributes:
        values: of the parameter before the update, or of its prediction.
        ahead: how many updates; -1 before the update, 0 if nothing is known.
        lr: learning rate of the last update.
    """

    values: Tensor
    ahead: float = 0.0
    lr: float = 0.0


class LastSteps:
    """Remembers the last update of one optimizer.

    Args:
        optimizer: the optimizer; its owner steps it.

    Attributes:
        before_update: called before every update.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self._originals = optimizer, Originals()
        self.before_update: list[Callable[[], None]] = []
        self._kept: dict[Tensor, _AsKept] = {}
        self._hook = optimizer.register_step_pre_hook(self._before_step)

    def predicted(
        self, parameters: Iterable[Tensor], ahead: int, *, anew: bool = False
    ) -> dict[Tensor, Tensor]:
        """Parameters some updates ahead, as if each did what the last one did.

        Those that it has not updated are left out; from the first time on that a parameter is asked
        for, its updates are noticed. With the learning rate of now, which a schedule may have
        changed since.

        Args:
            parameters: of any optimizer.
            ahead: how many updates.
            anew: whether predictions have memory of their own; otherwise they are written over the
                last ones.
        """
        wanted, found = set(parameters), dict[Tensor, Tensor]()
        for group in self._optimizer.param_groups:
            lr = self._originals.number(group["lr"])
            for parameter in wanted.intersection(group["params"]):
                kept = self._of(parameter)
                before = None if kept.ahead else self._before(parameter, group, lr)
                if before is not None:
                    kept.values.copy_(before)
                    kept.ahead, kept.lr = -1.0, lr
                further = ahead * (lr / kept.lr if kept.lr else 1.0)
                if not kept.ahead or not (further or anew):
                    continue
                # kept is W + a Δ; W + b Δ lies 1 - b / a of the way from there to W
                way = 1 - further / kept.ahead
                if anew:
                    found[parameter] = torch.lerp(kept.values, parameter.detach(), way)
                else:
                    found[parameter] = kept.values.lerp_(parameter.detach(), way)
                    kept.ahead = further
        return found

    def _of(self, parameter: Tensor) -> _AsKept:
        if parameter not in self._kept:
            self._kept[parameter] = _AsKept(torch.empty_like(parameter, requires_grad=False))
        return self._kept[parameter]

    def _before(self, parameter: Tensor, group: Group, lr: float) -> Tensor | None:
        """A parameter before its last update, if that follows from the optimizer's state.

        Sub-classes may step otherwise, so only the classes themselves are known.
        """
        kind, state = type(self._optimizer), self._optimizer.state.get(parameter, {})
        value = parameter.detach()
        if kind in (Adam, AdamW) and "exp_avg" in state:
            count, (first_decay, second_decay) = float(state["step"]), group["betas"]
            squares = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
            roots = (squares / (1 - second_decay**count)).sqrt_().add_(group["eps"])
            rate = lr / (1 - first_decay**count)
            before = torch.addcdiv(value, state["exp_avg"], roots, value=rate)
            is_apart = group.get("decoupled_weight_decay", False)
            return before / (1 - lr * group["weight_decay"]) if is_apart else before
        has_momentum = kind in (SGD, RMSprop) and group["momentum"] and not group.get("nesterov")
        momentum = state.get("momentum_buffer") if has_momentum else None
        return None if momentum is None else torch.add(value, momentum, alpha=lr)

    def copies(self, parameters: Iterable[Tensor]) -> Iterable[Tensor]:
        """What is held of parameters beside them."""
        return [self._kept[p].values for p in parameters if p in self._kept]

    def forget(self) -> None:
        """Forgets what was kept before updates, as whoever resumes does."""
        for kept in self._kept.values():
            kept.ahead = 0.0

    def close(self) -> None:
        """Watches no more."""
        self._hook.remove()

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
        for group in self._optimizer.param_groups:
            lr = self._originals.number(group["lr"])
            for parameter in group["params"]:
                kept = self._kept.get(parameter)
                if kept is not None and parameter.grad is not None:
                    kept.values.copy_(parameter.detach())
                    kept.ahead, kept.lr = -1.0, lr
