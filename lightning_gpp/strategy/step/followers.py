"""What the other ranks do while rank 0 runs the user's code: they follow its calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from lightning_gpp.runtime.gradients import loss_that_calls
from lightning_gpp.strategy.pipelined_run import PipelinedRun
from lightning_gpp.strategy.ranks.messages import (
    Backward,
    BackwardEnd,
    Build,
    Forward,
    News,
    ReadAll,
    ReadBatch,
    ReadEnd,
    Trial,
)
from lightning_gpp.strategy.step.loaders import read_on
from lightning_gpp.strategy.step.open_call import OpenCall
from lightning_gpp.strategy.step.trials import take_part

M = TypeVar("M")


class Follower:
    """Follows rank 0.

    Args:
        run: of this rank.

    Attributes:
        value: what was told with the message at which :meth:`until` ended.
        batches: what a step that reads by itself reads from.
        read_all: makes the module whole for a while.
        end_reading: undoes that.
        manual: does what manual optimization does on rank 0; None in automatic optimization.
    """

    def __init__(self, run: PipelinedRun) -> None:
        self._run = run
        self._calls: dict[int, OpenCall] = {}
        self.value: Any = None
        self.batches: Any = None
        self.manual: Callable[[Any], None] | None = None
        self.read_all: Callable[[ReadAll], None]
        self.end_reading: Callable[[], None]

    def until(self, *ends: type[M], doing: str) -> M:
        """Does what rank 0 does, up to a message of one of these types, which is returned.

        What was told with that message is in :attr:`value`.
        """
        while True:
            message, news, self.value = self._run.control.hear(f"waiting for rank 0's {doing}")
            self._apply(news)
            if isinstance(message, ends):
                return message
            self._follow(message)

    def _apply(self, news: News) -> None:
        if news.changes:
            self._run.leader_state.apply(news.changes)
        for number in news.dropped:
            self._calls.pop(number, None)
        self._run.take_gradients(news.gradients)

    def _follow(self, message: Any) -> None:
        run = self._run
        match message:
            case Build():
                with message.autocast.while_building(run.device):
                    run.build(None)
            case ReadAll():
                self.read_all(message)
            case ReadEnd():
                self.end_reading()
            case ReadBatch():
                read_on(self.batches)
            case Trial():
                with message.autocast.on(run.device):
                    take_part(run, message)
            case Forward(call=None):
                run.run_forward(message, None)
            case Forward():
                assert message.call is not None
                call = self._calls[message.call] = run.open_call(message, None)
                with message.autocast.on(run.device):
                    call.forward()
            case Backward():
                call = self._calls[message.call]
                if not message.retain:
                    del self._calls[message.call]
                call.backward(retain=message.retain, hands_out=message.hands_out)
            case _:
                assert self.manual is not None, f"rank 0 told {message!r} in automatic optimization"
                self.manual(message)

    def loss(self, value: Tensor) -> Tensor:
        """A loss with this value whose backward follows rank 0's."""
        return loss_that_calls(value, lambda _: self.until(BackwardEnd, doing="backward"))
