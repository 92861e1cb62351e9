"""Manual optimization: what a step on rank 0 does with optimizers, all ranks do.

Every rank holds some parameters of each optimizer. So a step of an optimizer, clearing gradients,
toggling and clipping are told to the other ranks, which do the same with theirs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_gpp.common.instance_attribute import instance_attribute
from lightning_gpp.strategy.lightning_private import LightningOptimizer, do_nothing_closure
from lightning_gpp.strategy.pipelined_run import PipelinedRun
from lightning_gpp.strategy.ranks.messages import (
    ClosureEnd,
    ManualBackward,
    OptimizerRef,
    OptimizerStep,
    RelayedCall,
)
from lightning_gpp.strategy.step.followers import Follower
from lightning_gpp.strategy.step.forward_calls import led_backward

_MODULE_METHODS = ("toggle_optimizer", "untoggle_optimizer", "clip_gradients")


class ManualOptimization:
    """Relays what a training step on rank 0 does by hand.

    Args:
        run: of this rank.
        follower: what this rank does while rank 0 runs user code.
        wrapped: Lightning's wrappers of the optimizers.
    """

    def __init__(
        self, run: PipelinedRun, follower: Follower, wrapped: Sequence[LightningOptimizer]
    ) -> None:
        self._run = run
        self._follower = follower
        self._wrapped = wrapped

    @property
    def _is_everywhere(self) -> bool:
        """Whether what runs now runs on all ranks."""
        return self._run.control.alone_in is None

    # Rank 0 ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def relaying(self) -> Iterator[None]:
        """Rank 0: what user code here does in this with optimizers, the others do too."""
        with contextlib.ExitStack() as stack:

            def put(obj: Any, method: str, owner: str | int) -> None:
                relay = self._relay(getattr(obj, method), owner, method)
                stack.enter_context(instance_attribute(obj, method, relay))

            for name in _MODULE_METHODS:
                put(self._run.module, name, "")
            for name, part in self._run.module.named_modules():
                put(part, "zero_grad", name)
            for index, each in enumerate(self._wrapped):
                put(each.optimizer, "zero_grad", index)
                stack.enter_context(instance_attribute(each, "zero_grad", each.optimizer.zero_grad))
                for hook in (
                    each.optimizer.register_step_pre_hook(self._before_step),
                    each.optimizer.register_step_post_hook(self._after_step),
                ):
                    stack.callback(hook.remove)
            yield

    def _relay(self, call: Callable[..., Any], owner: str | int, method: str) -> Callable[..., Any]:
        @functools.wraps(call)
        def relayed(*args: Any, **kwargs: Any) -> Any:
            if self._is_everywhere:
                return call(*args, **kwargs)
            refs = tuple(map(self._reference, args))
            named = {key: self._reference(value) for key, value in kwargs.items()}
            self._run.lead(RelayedCall(owner, method, refs, named))
            with self._run.control.together(), self._groups(method):
                result = call(*args, **kwargs)
            self._run.leader_state.look_again()
            return result

        return relayed

    def _groups(self, method: str) -> contextlib.AbstractContextManager[None]:
        """Toggling sees the groups of one device: what it freezes shows on every rank."""
        return self._run.whole_optimizers() if "toggle" in method else contextlib.nullcontext()

    def _reference(self, value: Any) -> Any:
        plain = value.optimizer if isinstance(value, LightningOptimizer) else value
        if isinstance(plain, Optimizer):
            return OptimizerRef(self._index(plain))
        return value

    def _index(self, optimizer: Optimizer) -> int:
        for index, known in enumerate(self._wrapped):
            if known.optimizer is optimizer:
                return index
        raise ValueError(
            f"a {type(optimizer).__name__} steps in training_step that configure_optimizers did "
            "not return; other ranks do not know it. Return all optimizers from there."
        )

    @contextlib.contextmanager
    def step(
        self, optimizer: Optimizer, closure: Callable[[], Any], arguments: dict[str, Any]
    ) -> Iterator[Callable[[], Any]]:
        """The body steps Lightning's wrapper of an optimizer, with the closure yielded."""
        if self._is_everywhere:
            yield closure
            return
        has_closure = closure is not do_nothing_closure
        self._run.lead(OptimizerStep(self._index(optimizer), True, has_closure, arguments))
        if has_closure:
            closure = self._told(closure)
        with self._run.control.together():
            yield closure
        self._run.leader_state.look_again()

    @contextlib.contextmanager
    def backward(self, loss: Tensor) -> Iterator[Tensor]:
        """The body goes backward from the loss yielded, with the hooks around it."""
        if self._is_everywhere:
            yield loss
            return
        self._run.lead(ManualBackward(loss.detach()))
        with self._run.control.together():
            yield led_backward(loss, self._run)

    def _told(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure, which user code of rank 0 is again, and whose end is told."""
        name = self._run.control.alone_in
        assert name is not None

        def told() -> Any:
            with self._run.control.alone(name):
                result = closure()
            self._run.lead(ClosureEnd())
            return result

        return told

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """A step of an optimizer itself, without Lightning's wrapper."""
        if self._is_everywhere:
            return None
        closure = kwargs.pop("closure", None) or (args[1] if len(args) > 1 else None)
        message = OptimizerStep(self._index(optimizer), False, closure is not None, dict(kwargs))
        self._run.lead(message)
        if closure is not None:
            kwargs["closure"] = self._told(closure)
        return args[:1], kwargs

    def _after_step(self, *_: Any) -> None:
        self._run.leader_state.look_again()

    # Other ranks -----------------------------------------------------------------------------

    def follow(self, message: Any) -> None:
        """Other ranks: does what rank 0 does."""
        match message:
            case ManualBackward():
                loss = self._follower.loss(self._run.on_device(message.loss))
                self._run.module.manual_backward(loss)
            case OptimizerStep():
                wrapped = self._wrapped[message.optimizer]
                optimizer: Any = wrapped if message.is_wrapped else wrapped.optimizer
                arguments = dict(message.arguments)
                if message.has_closure:
                    arguments["closure"] = partial(
                        self._follower.until, ClosureEnd, doing="closure"
                    )
                optimizer.step(**arguments)
            case RelayedCall():
                owner: Any = (
                    self._wrapped[message.owner].optimizer
                    if isinstance(message.owner, int)
                    else self._run.module.get_submodule(message.owner)
                )
                args = map(self._resolved, message.args)
                kwargs = {key: self._resolved(value) for key, value in message.kwargs.items()}
                with self._groups(message.method):
                    getattr(owner, message.method)(*args, **kwargs)
            case _:
                raise RuntimeError(f"rank 0 told {message!r}, which nothing here answers to")

    def _resolved(self, value: Any) -> Any:
        return self._wrapped[value.index] if isinstance(value, OptimizerRef) else value
