"""Manual optimization: repeats on all ranks what the step does with optimizers on rank 0.

Every rank holds some parameters of each optimizer. So a step of an optimizer, clearing gradients,
toggling and clipping are told to the other ranks, which do the same with theirs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_gpp.common.instance_attribute import instance_attribute
from lightning_gpp.strategy.lightning_private import LightningOptimizer, do_nothing_closure
from lightning_gpp.strategy.pipelined_run import PipelinedRun
from lightning_gpp.strategy.ranks.messages import ManualBackward, OptimizerRef, RelayedCall
from lightning_gpp.strategy.step.followers import Follower
from lightning_gpp.strategy.step.forward_calls import led_backward

_MODULE_METHODS = ("toggle_optimizer", "untoggle_optimizer", "clip_gradients")


class ManualOptimization:
    """Relays what a training step on rank 0 does with optimizers.

    Args:
        run: of this rank.
        follower: what this rank does while rank 0 runs user code.

    Attributes:
        wrapped: Lightning's wrappers of the optimizers.
    """

    def __init__(self, run: PipelinedRun, follower: Follower) -> None:
        self._run, self._follower = run, follower
        self.wrapped: Sequence[LightningOptimizer] = ()
        follower.manual = self.follow

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
            for index, each in enumerate(self.wrapped):
                put(each.optimizer, "zero_grad", index)
                stack.enter_context(instance_attribute(each, "zero_grad", each.optimizer.zero_grad))
                stack.callback(each.optimizer.register_step_pre_hook(self._refuse_alone).remove)
            yield

    def _relay(self, call: Callable[..., Any], owner: str | int, method: str) -> Callable[..., Any]:
        @functools.wraps(call)
        def relayed(*args: Any, **kwargs: Any) -> Any:
            if self._run.is_everywhere:
                return call(*args, **kwargs)
            refs = tuple(map(self._reference, args))
            named = {key: self._reference(value) for key, value in kwargs.items()}
            with self._together(RelayedCall(owner, method, refs, named)), self._groups(method):
                return call(*args, **kwargs)

        return relayed

    @contextlib.contextmanager
    def _together(self, message: Any) -> Iterator[None]:
        """The other ranks, who are told, do what the body does."""
        self._run.lead(message)
        with self._run.control.together():
            yield
        self._run.leader_state.look_again()

    def _groups(self, method: str) -> contextlib.AbstractContextManager[None]:
        """Toggling sees the groups of one device: what it freezes shows on every rank."""
        return self._run.whole_optimizers() if "toggle" in method else contextlib.nullcontext()

    def _reference(self, value: Any) -> Any:
        plain = value.optimizer if isinstance(value, LightningOptimizer) else value
        return OptimizerRef(self._index(plain)) if isinstance(plain, Optimizer) else value

    def _index(self, optimizer: Optimizer) -> int:
        for index, known in enumerate(self.wrapped):
            if known.optimizer is optimizer:
                return index
        raise ValueError(
            f"a {type(optimizer).__name__} steps in training_step that configure_optimizers did "
            "not return; other ranks do not know it. Return all optimizers from there."
        )

    @contextlib.contextmanager
    def step(
        self, optimizer: Optimizer, closure: Callable[[], Any], arguments: dict[str, Any]
    ) -> Iterator[None]:
        """The body, on rank 0 alone so far, steps an optimizer.

        Raises:
            NotImplementedError: the user gave a closure.
        """
        if closure is not do_nothing_closure:
            raise NotImplementedError(
                "optimizer.step(closure=...) in manual optimization: the closure would run on rank "
                "0 in the midst of a step of all ranks; go backward first (self.manual_backward), "
                "then call optimizer.step()"
            )
        with self._together(RelayedCall(self._index(optimizer), "step", (), arguments)):
            yield

    @contextlib.contextmanager
    def backward(self, loss: Tensor) -> Iterator[Tensor]:
        """The body, on rank 0 alone so far, goes backward from the loss yielded."""
        self._run.lead(ManualBackward(loss.detach()))
        with self._run.control.together():
            yield led_backward(loss, self._run)

    def _refuse_alone(self, *_: Any) -> None:
        """Before any step of an optimizer, also one that Lightning's wrapper does not see."""
        if not self._run.is_everywhere:
            raise NotImplementedError(
                "an optimizer of torch was stepped directly, so other ranks do not step; step "
                "Lightning's: self.optimizers(), without use_pl_optimizer=False"
            )

    # Other ranks -----------------------------------------------------------------------------

    def follow(self, message: Any) -> None:
        """Other ranks: does what rank 0 does."""
        if isinstance(message, ManualBackward):
            loss = self._follower.loss(self._run.on_device(message.loss))
            self._run.module.manual_backward(loss)
            return
        assert isinstance(message, RelayedCall), message
        owner: Any
        if isinstance(message.owner, str):
            owner = self._run.module.get_submodule(message.owner)
        else:  # Lightning's wrapper counts steps
            wrapped = self.wrapped[message.owner]
            owner = wrapped if message.method == "step" else wrapped.optimizer
        args = map(self._resolved, message.args)
        kwargs = {key: self._resolved(value) for key, value in message.kwargs.items()}
        with self._groups(message.method):
            getattr(owner, message.method)(*args, **kwargs)

    def _resolved(self, value: Any) -> Any:
        return self.wrapped[value.index] if isinstance(value, OptimizerRef) else value
