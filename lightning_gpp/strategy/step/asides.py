"""User code outside of steps that calls the model.

Callbacks and hooks run on every rank, or the user has them do something on rank 0 only. Either way
rank 0 leads: it tells the others of an aside and what belongs to it, and they take part where they
wait for rank 0 next, which is in the same call if they come by it, too. Rank 0's result is that of
all ranks.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_gpp.common.instance_attribute import instance_attribute
from lightning_gpp.strategy.pipelined_run import PipelinedRun
from lightning_gpp.strategy.ranks.control import Aside
from lightning_gpp.strategy.ranks.messages import AsideEnd
from lightning_gpp.strategy.state.held_elsewhere import HeldElsewhere
from lightning_gpp.strategy.step.followers import Follower
from lightning_gpp.strategy.step.forward_calls import ForwardCalls

_PASSED_OVER = ("torch", "lightning_gpp", "contextlib", "functools")


class Asides:
    """What this rank does while such code runs.

    Args:
        run: of this rank.
        follower: what other ranks do.
        forward: stands in for the pipelined forward on rank 0.
    """

    def __init__(self, run: PipelinedRun, follower: Follower, forward: ForwardCalls) -> None:
        self._run, self._follower, self._forward = run, follower, forward
        run.control.on_aside, run.around_aside = self._take_part, self.around

    @contextmanager
    def around(self) -> Iterator[None]:
        """The body is user code outside of steps."""
        run = self._run
        if run.model is None or run.is_alone or run.is_shape_only:
            yield
            return
        forward = functools.wraps(run.target.forward)(functools.partial(self._call))
        with (
            instance_attribute(run.target, "forward", forward),
            instance_attribute(run.target, "_compiled_call_impl", None),
            HeldElsewhere(None),
        ):
            yield

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """Stands in for the pipelined forward; nothing can go backward through it.

        Raises:
            RuntimeError: rank 0 does not come by.
        """
        run, place = self._run, _place()
        with run.failures.guard():
            if run.control.is_leader:
                run.control.tell(Aside(place))
                with run.control.aside(), torch.no_grad():
                    value = self._forward(*args, **kwargs)
                run.lead(AsideEnd(value))
                return value
            while True:
                aside = run.control.hear_any(f"waiting for rank 0's call at {place}")
                if not isinstance(aside, Aside):
                    raise RuntimeError(NOT_ON_RANK_0.format(place, run.control.rank))
                value = self._take_part(aside)
                if aside.place == place:
                    return value

    def _take_part(self, aside: Aside) -> Any:
        """Other ranks: what rank 0 does there; its result."""
        if (model := self._run.model) is not None:
            model.time.leave()
        with self._run.control.aside():
            end = self._follower.until(AsideEnd, doing=f"call at {aside.place}")
        return self._run.on_device(end.value)


NOT_ON_RANK_0 = (
    "{} calls the model on rank {} and not on rank 0, which leads what the pipeline does. Do it on "
    "all ranks, or on rank 0 (trainer.is_global_zero)."
)


def _place() -> str:
    """Module and line of the innermost running code that is not torch's or ours."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").partition(".")[0] in _PASSED_OVER and frame.f_back:
        frame = frame.f_back
    return f"{frame.f_globals.get('__name__', '')}:{frame.f_lineno}"
