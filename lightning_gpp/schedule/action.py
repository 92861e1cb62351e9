"""Actions: the units of work in a program."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from lightning_gpp.graph import FEED


class Kind(Enum):
    """What an action does; the value is its text form."""

    FORWARD = "F"
    BACKWARD = "B"
    SEND_FORWARD = "SF"
    RECEIVE_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECEIVE_BACKWARD = "RB"
    REDUCE = "R"
    STEP = "S"

    @property
    def is_compute(self) -> bool:
        """Whether it runs operators."""
        return self in (Kind.FORWARD, Kind.BACKWARD)

    @property
    def is_forward(self) -> bool:
        """Whether it is a forward or a message with activations."""
        return self in (Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)

    @property
    def is_send(self) -> bool:
        """Whether it hands a message to the transport (and does not wait)."""
        return self in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)

    @property
    def is_receive(self) -> bool:
        """Whether it waits for a message."""
        return self in (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD)


Message = tuple[int, int, bool, int]
"""Sending stage, receiving stage, whether it is a gradient, index on the edge."""

_KINDS = "|".join(kind.value for kind in Kind)
_TEXT = re.compile(rf"(-?\d+)({_KINDS})(\d+)(?:([<>])(-?\d+))?")


@dataclass(frozen=True, slots=True)
class Action:
    """One unit of work of one stage.

    The text form extends the one of ``torch.distributed.pipelining``: ``2F0`` is the forward of
    stage 2 for micro-batch 0, ``2SF0>3`` sends its result to stage 3, ``3RF0<2`` receives it
    there, ``3SB0>2`` and ``2RB0<3`` do the same with the gradient. ``2R0`` sums the gradients of a
    reduce group, and in ``2S0`` the device of stage 2 updates all of its parameters by those of
    mini-batch 0. Stage -1 is the feed.

    Attributes:
        stage: the stage that acts.
        kind: what it does.
        microbatch: index of the stage's own micro-batch for compute; of the message on its edge
            for sends and receives; for :attr:`Kind.REDUCE` that of the mini-batch, times the number
            of reduce groups, plus that of the group; of the mini-batch for :attr:`Kind.STEP`.
        peer: the other stage of a message, else None.

    >>> str(Action(stage=2, kind=Kind.FORWARD, microbatch=0))
    '2F0'
    >>> Action.parse("1B3")
    Action(stage=1, kind=<Kind.BACKWARD: 'B'>, microbatch=3, peer=None)
    >>> str(Action.parse("3RF0<2"))
    '3RF0<2'
    """

    stage: int
    kind: Kind
    microbatch: int
    peer: int | None = None

    def __post_init__(self) -> None:
        if (self.peer is not None) != (self.kind.is_send or self.kind.is_receive):
            raise ValueError(f"{self.kind.name} of stage {self.stage} with peer {self.peer}")

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind.value}{self.microbatch}"
        if self.peer is None:
            return text
        return f"{text}{'>' if self.kind.is_send else '<'}{self.peer}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Reads the text form.

        Raises:
            ValueError: the text is not an action.
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"not an action: {text!r}; expected a form like '2F0' or '2SF0>3'")
        stage, kind, microbatch, arrow, peer = match.groups()
        action = cls(int(stage), Kind(kind), int(microbatch), None if peer is None else int(peer))
        if arrow is not None and (arrow == ">") != action.kind.is_send:
            raise ValueError(f"not an action: {text!r}; sends take '>', receives take '<'")
        return action

    @property
    def message(self) -> Message:
        """The message it sends or receives, the same on both sides."""
        assert self.peer is not None
        backward = self.kind in (Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD)
        if self.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
            return self.stage, self.peer, backward, self.microbatch
        return self.peer, self.stage, backward, self.microbatch


FORWARD_UNITS, BACKWARD_UNITS = 1, 2
"""Unit times of a forward and a backward of one unit: a backward makes two products of matrices
(gradients of the input and of the weight) for one of the forward."""


def unit_time_s(action: Action) -> float:
    """One second per forward, two per backward; messages and the feed are free."""
    if action.stage == FEED:
        return 0.0
    times_s = {Kind.FORWARD: FORWARD_UNITS, Kind.BACKWARD: BACKWARD_UNITS}
    return float(times_s.get(action.kind, 0))
