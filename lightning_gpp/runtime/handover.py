"""What stages hand to each other: values on their way, cut and joined where sizes differ.

A stage exchanges one payload per micro-batch with each of its neighbours. Where the neighbour
takes other units at a time, or has replicas, the payload is cut into the messages that go to each
of them, or joined from theirs. Replicas hold different samples, so theirs are joined; gradients
from different stages are of the same samples, so they are added up (by autograd).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_gpp.graph import StageEdge
from lightning_gpp.runtime.payload import Payload
from lightning_gpp.runtime.pieces import Cutter
from lightning_gpp.runtime.transport.transport import Tag
from lightning_gpp.schedule import Action, Part, Program


class NothingCameError(RuntimeError):
    """A stage was to get values from another one, which has failed."""


@dataclass(slots=True)
class Handover:
    """The payloads between the stages of one rank and all others, during one program.

    Attributes:
        program: says who exchanges what.
        unit_sizes: samples of each unit.
        cutter: cuts and joins values.
        outbox: what stages of this rank have made, by message.
        inbox: what has been received.
        shift: added to the numbers of messages, where the program is a part of a longer training.
    """

    program: Program
    unit_sizes: Sequence[int]
    cutter: Cutter
    outbox: dict[Tag, Payload]
    inbox: dict[Tag, Payload]
    shift: int = 0

    def tag(self, message: Action) -> Tag:
        """The identity of what an action sends or receives."""
        *ends, index = message.message
        return (*ends, index + self.shift)  # type: ignore[return-value]

    def take(
        self, edges: Sequence[StageEdge], stage: int, microbatch: int, *, backward: bool
    ) -> Payload:
        """What has come for one micro-batch of a stage from the replicas of another.

        Args:
            edges: between the two, a group of :attr:`Program.in_groups` (forward) or
                :attr:`Program.out_groups` (backward).
            stage: the stage that takes.
            microbatch: its micro-batch.
            backward: whether gradients are meant.
        """
        messages = self.program.messages(edges, stage, microbatch)
        payloads = []
        for edge, index, _ in messages:
            box = self.outbox if self.program.is_local(edge) else self.inbox
            payloads.append(box.pop(self._tag(edge, index, backward)).settle())
        if not backward and any(payload.is_nothing for payload in payloads):
            raise NothingCameError(f"{self.program.replica(edges[0].source)} has failed")
        if len(payloads) == 1:
            return payloads[0]
        sizes = [self._samples(part) for *_, part in messages]
        with self._naming_ends(edges[0]):
            return self.cutter.join(edges[0].values, payloads, sizes, backward=backward)

    def put(
        self,
        edges: Sequence[StageEdge],
        stage: int,
        microbatch: int,
        payload: Payload,
        *,
        backward: bool,
    ) -> None:
        """Puts what one micro-batch of a stage has for the replicas of another into the outbox.

        Args:
            edges: between the two, a group of :attr:`Program.out_groups` (forward) or
                :attr:`Program.in_groups` (backward).
            stage: the stage that gives.
            microbatch: its micro-batch.
            payload: the values, or their gradients.
            backward: whether gradients are meant.
        """
        messages = self.program.messages(edges, stage, microbatch)
        if len(messages) == 1:
            edge, index, _ = messages[0]
            self.outbox[self._tag(edge, index, backward)] = payload
            return
        sizes = [self._samples(part) for *_, part in messages]
        with self._naming_ends(edges[0]):
            pieces = self.cutter.cut(edges[0].values, payload, sizes, backward=backward)
        for (edge, index, _), piece in zip(messages, pieces, strict=True):
            self.outbox[self._tag(edge, index, backward)] = piece

    def put_nothing(self, edges: Sequence[StageEdge], stage: int, microbatch: int) -> None:
        """Puts as many messages as :meth:`put` would, which say that the forward has failed."""
        for edge, index, _ in self.program.messages(edges, stage, microbatch):
            self.outbox[self._tag(edge, index, False)] = Payload.nothing()

    def _tag(self, edge: StageEdge, index: int, backward: bool) -> Tag:
        ends = (edge.target, edge.source) if backward else (edge.source, edge.target)
        return (*ends, backward, index + self.shift)

    def _samples(self, part: Part) -> int:
        return sum(self.unit_sizes[part.start : part.stop])

    @contextlib.contextmanager
    def _naming_ends(self, edge: StageEdge) -> Iterator[None]:
        """Errors say between which stages."""
        try:
            yield
        except ValueError as error:
            ends = (self.program.replica(stage) for stage in (edge.source, edge.target))
            raise ValueError(f"{' to '.join(map(str, ends))}: {error}") from error
