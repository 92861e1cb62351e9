"""What stages hand to each other: values on their way, cut and joined where sizes differ.

A stage exchanges one payload per micro-batch with each of its neighbours. Where the neighbour
takes other units at a time, or has replicas, the payload is cut into the messages that go to each
of them, or joined from theirs. Replicas hold different samples, so theirs are joined; gradients
from different stages are of the same samples, so they are added up (by autograd).
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_gpp.graph import StageEdge
from lightning_gpp.runtime.payload import Payload
from lightning_gpp.runtime.pieces import cut, join
from lightning_gpp.runtime.transport import Tag
from lightning_gpp.schedule import Part, Program


@dataclass(slots=True)
class Handover:
    """The payloads between the stages of one rank and all others, during one mini-batch.

    Attributes:
        program: says who exchanges what.
        unit_sizes: samples of each unit.
        batch_dims: value name -> dimension of the samples for each of its tensors.
        outbox: what stages of this rank have made; sends take it, or consumers on this rank.
        inbox: what has been received.
    """

    program: Program
    unit_sizes: Sequence[int]
    batch_dims: Mapping[str, tuple[int | None, ...]]
    outbox: dict[Tag, Payload] = field(default_factory=dict)
    inbox: dict[Tag, Payload] = field(default_factory=dict)

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
            payloads.append(box.pop(_tag(edge, index, backward)))
        if len(payloads) == 1:
            return payloads[0]
        return self._joined(edges[0], payloads, [self._samples(part) for *_, part in messages])

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
        pieces = self._cut(edges[0], payload, [self._samples(part) for *_, part in messages])
        for (edge, index, _), piece in zip(messages, pieces, strict=True):
            self.outbox[_tag(edge, index, backward)] = piece

    def _samples(self, part: Part) -> int:
        return sum(self.unit_sizes[part.start : part.stop])

    def _cut(self, edge: StageEdge, payload: Payload, sizes: Sequence[int]) -> list[Payload]:
        if len(sizes) == 1:
            return [payload]
        _refuse_numbers(edge, payload)
        columns: list[Sequence[Tensor | None]] = []
        for tensor, (name, dim) in zip(
            payload.tensors, self._dims(edge, len(payload.tensors)), strict=True
        ):
            columns.append([None] * len(sizes) if tensor is None else cut(tensor, sizes, dim, name))
        return [
            Payload([column[i] for column in columns], payload.requires_grad, payload.structure)
            for i in range(len(sizes))
        ]

    def _joined(
        self, edge: StageEdge, payloads: Sequence[Payload], sizes: Sequence[int]
    ) -> Payload:
        """Several payloads as one; what is not a tensor must be equal in all."""
        first = payloads[0]
        if any(payload.structure != first.structure for payload in payloads):
            raise ValueError(
                f"{self._ends(edge)}: values differ between micro-batches and are not tensors, so "
                f"they cannot be joined; {_REMEDY}"
            )
        _refuse_numbers(edge, first)
        tensors = [
            join([payload.tensors[i] for payload in payloads], sizes, dim, name)
            for i, (name, dim) in enumerate(self._dims(edge, len(first.tensors)))
        ]
        return Payload(tensors, first.requires_grad, first.structure)

    def _dims(self, edge: StageEdge, count: int) -> list[tuple[str, int | None]]:
        """(value name, batch dimension) of every tensor of an edge."""
        dims = [(name, dim) for name in edge.values for dim in self.batch_dims.get(name, (None,))]
        if len(dims) != count:
            raise ValueError(
                f"{self._ends(edge)}: the edge carries {count} tensors where the captured model "
                f"has {len(dims)}, so they cannot be cut or joined; {_REMEDY}"
            )
        return dims

    def _ends(self, edge: StageEdge) -> str:
        return f"{self.program.replica(edge.source)} to {self.program.replica(edge.target)}"


_REMEDY = "give the stages on both sides the same microbatch_multiple and as many devices"


def _tag(edge: StageEdge, index: int, backward: bool) -> Tag:
    ends = (edge.target, edge.source) if backward else (edge.source, edge.target)
    return (*ends, backward, index)


def _refuse_numbers(edge: StageEdge, payload: Payload) -> None:
    """A number beside tensors may be a count of samples, which is another one in a part."""
    if payload.structure is None:
        return
    leaves = pytree.tree_leaves(pickle.loads(payload.structure))
    if any(isinstance(leaf, int | float) and not isinstance(leaf, bool) for leaf in leaves):
        raise ValueError(
            f"{', '.join(edge.values)} hold plain numbers, which may be sizes, so they cannot be "
            f"cut or joined; {_REMEDY}"
        )
