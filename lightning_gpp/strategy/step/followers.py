"""The other ranks follow rank 0's messages while it runs the user's code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from lightning_gpp.runtime.gradients import GradientStash, loss_that_calls
from lightning_gpp.strategy.forms import build_form
from lightning_gpp.strategy.logging.logs import replay
from lightning_gpp.strategy.pipeline import Pipeline
from lightning_gpp.strategy.pipelined_run import PipelinedRun
from lightning_gpp.strategy.ranks.messages import (
    AsyncMinibatch,
    Backward,
    BackwardEnd,
    Build,
    Forward,
    HookEnd,
    Minibatch,
    ReadAll,
    ReadEnd,
    StepEnd,
    Told,
    Trial,
    UseForm,
)
from lightning_gpp.strategy.spmd.spmd_model import SpmdModel
from lightning_gpp.strategy.step.cut_checks import take_part
from lightning_gpp.strategy.step.pipelined_call import RankCall

M = TypeVar("M")


class Follower:
    """Follows rank 0.

    Args:
        run: of this rank.

    Attributes:
        window: runs a window of a pipeline that does not drain.
        read: makes the module whole for a while, and undoes that.
        manual: does what manual optimization does on rank 0.
    """

    def __init__(self, run: PipelinedRun) -> None:
        self._run = run
        self._calls: dict[int, RankCall] = {}
        self._stash: GradientStash | None = None
        self.manual: Callable[[Any], None]
        self.window: Callable[[AsyncMinibatch], GradientStash]
        self.read: Callable[[ReadAll | ReadEnd], None]

    def step(self, name: str) -> Tensor | None:
        """A loss whose backward follows rank 0's; None if the step has none."""
        run = self._run
        end = self.until(StepEnd, doing=name)
        replay(run.module, end.logs)
        run.end_if_asked(end.terminated)
        stash, self._stash = self._stash, None
        if end.loss is None:
            return None
        value: Tensor = run.on_device(end.loss)
        if stash is not None:
            return stash.loss(value)
        return self.loss(value) if run.module.automatic_optimization else value

    def hook(self, name: str) -> Any:
        """Waits for a hook of the user on rank 0, and returns its result."""
        end = self.until(HookEnd, doing=name)
        replay(self._run.module, end.logs)
        return self._run.on_device(end.answer)

    def loss(self, value: Tensor) -> Tensor:
        """A loss with this value whose backward follows rank 0's."""
        return loss_that_calls(value, lambda _: self.until(BackwardEnd, doing="backward"))

    def until(self, end: type[M], *, doing: str) -> M:
        """Does what rank 0 does, up to a message of this type, which is returned."""
        while True:
            told: Told = self._run.control.hear(f"waiting for rank 0's {doing}")
            news = told.news
            if news.changes:
                self._run.leader_state.apply(news.changes)
            for number in news.dropped:
                self._calls.pop(number, None)
            self._run.take_gradients(news.gradients)
            if isinstance(told.message, end):
                return told.message
            self._follow(told.message)

    @property
    def _model(self) -> Pipeline | SpmdModel:
        assert self._run.model is not None, "rank 0 builds first"
        return self._run.model

    def _follow(self, message: Any) -> None:
        run = self._run
        match message:
            case Build():
                with message.autocast.while_building(run.device):
                    build_form(run, None)
            case UseForm():
                run.model = run.forms[message.number]
            case ReadAll() | ReadEnd():
                self.read(message)
            case Trial():
                with message.autocast.on(run.device):
                    take_part(run, message)
            case Forward(call=None):
                self._model.forward(message, None)
            case Forward():
                assert message.call is not None
                if message.ahead is not None and not message.ahead.is_right:
                    run.forms[message.ahead.form].drop_ahead(message.ahead)
                call = self._calls[message.call] = self._model.call(message, None)
                with message.autocast.on(run.device):
                    call.forward()
            case Backward():
                call = self._calls[message.call]
                if not message.retain:
                    del self._calls[message.call]
                call.backward(retain=message.retain, hands_out=message.hands_out)
            case Minibatch():
                self._stash = run.built.train(message, None)
            case AsyncMinibatch():
                self._stash = self.window(message)
            case _:
                self.manual(message)
