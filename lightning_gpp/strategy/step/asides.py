"""User code outside of steps that calls the model, or reads all of its weights.

Callbacks and hooks run on every rank, or the user has them do something on rank 0 only. Either way
rank 0 leads: it tells the others of an aside and what belongs to it, and they take part where they
wait for rank 0 next, which is in the same call if they come by it, too. Rank 0's result is that of
all ranks.

In hooks around epochs and runs ``parameters()``, ``named_parameters()`` and ``state_dict()`` of the
module or a part of it make the module whole until the hook ends: histograms, norms and the like
read what they read on one device. Around batches that would move all weights for every batch; what
needs values that a rank lacks says so there (:mod:`~lightning_gpp.strategy.state.held_elsewhere`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch

from lightning_gpp.common.instance_attribute import instance_attribute
from lightning_gpp.strategy.lightning_private import innermost_function_mode
from lightning_gpp.strategy.pipelined_run import PipelinedRun
from lightning_gpp.strategy.ranks.control import Aside
from lightning_gpp.strategy.ranks.messages import AsideEnd, ReadAll, ReadEnd
from lightning_gpp.strategy.state.held_elsewhere import HeldElsewhere, lifted
from lightning_gpp.strategy.step.followers import Follower
from lightning_gpp.strategy.step.forward_calls import ForwardCalls

_READERS = ("named_parameters", "state_dict")
_PASSED_OVER = ("torch", "lightning_gpp", "contextlib", "functools")


class Asides:
    """Leads or follows such code on this rank.

    Args:
        run: of this rank.
        follower: what other ranks do.
        forward: stands in for the pipelined forward on rank 0.
    """

    def __init__(self, run: PipelinedRun, follower: Follower, forward: ForwardCalls) -> None:
        self._run, self._follower, self._forward = run, follower, forward
        self._is_whole = False
        run.control.on_aside, run.around_aside = self._take_part, self.around
        forward.before = self._stop_reading
        follower.read = self._read

    @contextmanager
    def around(self, hook: str) -> Iterator[None]:
        """The body is user code outside of steps.

        Args:
            hook: its name.
        """
        run = self._run
        if run.model is None or run.is_alone:
            yield
            return
        forward = functools.wraps(run.target.forward)(functools.partial(self._call))
        with (
            instance_attribute(run.target, "forward", forward),
            instance_attribute(run.target, "_compiled_call_impl", None),
            self.reading(hook),
            HeldElsewhere(None),
        ):
            yield

    @contextmanager
    def reading(self, hook: str) -> Iterator[None]:
        """All weights can be read in the body, if it is a hook around an epoch or a run."""
        run = self._run
        is_often = "batch" in hook or not hook.endswith(("_start", "_end"))
        # Rank 0 leads even if it holds everything, as others may not.
        has_all = not (run.control.is_leader or run.partition.is_partial)
        if is_often or run.model is None or has_all:
            yield
            return
        with ExitStack() as stack:
            for part in run.module.modules():
                for name in _READERS:
                    reader = self._reader(getattr(part, name))
                    stack.enter_context(instance_attribute(part, name, reader))
            yield
        self._stop_reading()

    def _stop_reading(self) -> None:
        """Before the hook ends, and before the model runs on what ranks hold."""
        if self._is_whole and self._run.control.is_leader:
            self._together(lambda: self._lead(ReadEnd()))

    def _reader(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def read(*args: Any, **kwargs: Any) -> Any:
            is_users = isinstance(innermost_function_mode(), HeldElsewhere)  # else it is lifted
            caller, _ = _outside(sys._getframe(1), ("torch",))
            is_users = is_users and not caller.startswith(("lightning.", "lightning_gpp."))
            if is_users and not self._is_whole:
                message = ReadAll(is_everywhere=self._run.control.alone_in is None)
                self._together(lambda: self._lead(message), is_over=lambda _: self._is_whole)
            return method(*args, **kwargs)

        return read

    def _lead(self, message: ReadAll | ReadEnd) -> None:
        with self._run.control.together():
            self._run.lead(message)
            self._read(message)
        self._run.leader_state.look_again()

    def _read(self, message: ReadAll | ReadEnd) -> None:
        """All ranks: the module is whole on rank 0, or everywhere; or ranks have theirs again."""
        self._is_whole = isinstance(message, ReadAll)
        with lifted():
            if isinstance(message, ReadAll):
                self._run.partition.read_all(on_all_ranks=message.is_everywhere)
            else:
                self._run.partition.make_partial()

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """Stands in for the pipelined forward; nothing can go backward through it."""

        def lead() -> Any:
            with torch.no_grad():
                return self._forward(*args, **kwargs)

        place = _place()
        return self._together(lead, is_over=lambda aside: aside.place == place)

    def _together(
        self, lead: Callable[[], Any], is_over: Callable[[Aside], bool] = lambda _: True
    ) -> Any:
        """Rank 0 leads this; other ranks that come by wait until it is over.

        Raises:
            RuntimeError: rank 0 does not come by.
        """
        run, place = self._run, _place()
        with run.failures.guard():
            if run.control.is_leader:
                run.control.tell(Aside(place))
                with run.control.aside():
                    value = lead()
                run.lead(AsideEnd(value))
                return value
            while True:
                aside = run.control.hear_any(f"waiting for rank 0's call at {place}")
                if not isinstance(aside, Aside):
                    raise RuntimeError(NOT_ON_RANK_0.format(place, run.control.rank))
                value = self._take_part(aside)
                if is_over(aside):
                    return value

    def _take_part(self, aside: Aside) -> Any:
        """Other ranks: what rank 0 does there; its result."""
        with self._run.control.aside():
            end = self._follower.until(AsideEnd, doing=f"call at {aside.place}")
        return self._run.on_device(end.value)


NOT_ON_RANK_0 = (
    "{} calls the model, or reads all of its weights, on rank {} but not on rank 0, which leads "
    "the pipeline. Do it on all ranks, or on rank 0 only (trainer.is_global_zero)."
)


def _place() -> str:
    """Module and line of the innermost running code that is not torch's or ours."""
    return "{}:{}".format(*_outside(sys._getframe(1), _PASSED_OVER))


def _outside(frame: FrameType, libraries: tuple[str, ...]) -> tuple[str, int]:
    """The module and line of the innermost frame from this one on that is not of libraries."""
    while frame.f_globals.get("__name__", "").partition(".")[0] in libraries and frame.f_back:
        frame = frame.f_back
    return frame.f_globals.get("__name__", ""), frame.f_lineno
