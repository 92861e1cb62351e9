"""Control messages from rank 0 to the others: steps, results, and whether there is a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_gpp.common.instance_attribute import instance_attribute
from lightning_gpp.common.mapped_tensor import in_pieces
from lightning_gpp.runtime.payload import pack_object, unpack
from lightning_gpp.runtime.transport.transport import Tag, Transport

_K = TypeVar("_K")
_V = TypeVar("_V")

_STEP: Tag = (-3, 0, 0, 0)
_GATHER: Tag = (-4, 0, 0, 0)
_GATHER_ASIDE: Tag = (-4, 1, 0, 0)
"""What ranks sent to where rank 0 has not come yet stays apart."""


@dataclass(frozen=True)
class Aside:
    """User code outside of a step calls the model; the messages that follow belong to it.

    Attributes:
        place: where that code is.
    """

    place: str


class Control:
    """Ordered messages between rank 0 and the others.

    Args:
        transport: moves them.
        timeout_s: limit of every wait.

    Attributes:
        transport: likewise.
        rank: this rank.
        num_ranks: number of ranks.
        is_leader: whether this is rank 0, which reads data and computes the loss.
        alone_in: name of the user code that runs on rank 0 only at the moment; None otherwise.
        on_aside: what other ranks do in an aside.
    """

    def __init__(self, transport: Transport, timeout_s: float) -> None:
        self.transport = transport
        self.rank, self.num_ranks = transport.rank, transport.num_ranks
        self.is_leader = self.rank == 0
        self._timeout_s = timeout_s
        self.alone_in: str | None = None
        self._gather: Tag = _GATHER
        self.on_aside: Callable[[Aside], Any]

    def alone(self, what: str) -> AbstractContextManager[None]:
        """Rank 0: while user code runs here and nowhere else, nothing may wait for the others.

        They wait for what it does next.
        """
        return instance_attribute(self, "alone_in", what)

    def together(self) -> AbstractContextManager[None]:
        """Rank 0: inside of user code, while the others have been told to take part."""
        return instance_attribute(self, "alone_in", None)

    def aside(self) -> AbstractContextManager[None]:
        """All ranks: what they do in an aside."""
        return instance_attribute(self, "_gather", _GATHER_ASIDE)

    def check_together(self) -> None:
        """Raises RuntimeError when rank 0 is about to wait for ranks that are elsewhere."""
        if self.alone_in is not None:
            raise RuntimeError(
                f"{self.alone_in} runs on rank 0 only, so it cannot save checkpoints, wait at "
                "barriers or do anything else that all ranks do together. Do it in a callback or "
                "in a hook that runs on every rank."
            )

    def tell(self, obj: Any) -> None:
        """Rank 0: sends an object (tensors welcome) to every other rank, without waiting."""
        others = range(1, self.num_ranks)
        payload = pack_object(obj) if others else None
        for rank in others:
            assert payload is not None
            self.transport.send(payload, target=rank, tag=_STEP)

    def hear(self, purpose: str) -> Any:
        """Other ranks: the next object that rank 0 tells, beside asides, which are taken part in.

        Args:
            purpose: of the waiting, for errors.
        """
        while isinstance(told := self.hear_any(purpose), Aside):
            self.on_aside(told)
        return told

    def hear_any(self, purpose: str) -> Any:
        """Other ranks: the next object that rank 0 tells."""
        payload = self.transport.receive(
            source=0, tag=_STEP, timeout_s=self._timeout_s, purpose=purpose
        )
        return unpack(payload)

    def share(self, obj: Any, purpose: str) -> Any:
        """All ranks: rank 0's object."""
        self.check_together()
        if self.is_leader:
            self.tell(obj)
            return obj
        return self.hear(purpose)

    def send_to(self, rank: int, obj: Any) -> None:
        """Sends an object to one rank."""
        self.transport.send(pack_object(obj), target=rank, tag=self._gather)

    def receive_from(self, rank: int, purpose: str) -> Any:
        """The next object that one rank sends with :meth:`send_to`."""
        payload = self.transport.receive(
            source=rank, tag=self._gather, timeout_s=self._timeout_s, purpose=purpose
        )
        return unpack(payload)

    def combined(self, obj: Any, combine: Callable[[list[Any]], Any], purpose: str) -> Any:
        """All ranks: what rank 0 makes of every rank's object."""
        gathered = self.gather(obj, purpose)
        return self.share(combine(gathered) if self.is_leader else None, purpose)

    def meet(self, purpose: str) -> None:
        """All ranks: waits for the others."""
        self.combined(None, lambda _: None, purpose)

    def gather(self, obj: Any, purpose: str) -> list[Any]:
        """All ranks: every rank's object on rank 0, an empty list on the others."""
        self.check_together()
        if not self.is_leader:
            self.send_to(0, obj)
            self.transport.flush()
            return []
        return [obj, *(self.receive_from(rank, purpose) for rank in range(1, self.num_ranks))]

    def collect(
        self, own: Mapping[_K, _V], purpose: str, store: Callable[[_V], _V]
    ) -> dict[_K, _V]:
        """All ranks: on rank 0 the entries of all, of which the first rank's counts; else nothing.

        They come in pieces, each asked for, so that rank 0 has the memory of one at a time.

        Args:
            own: this rank's: tensors, or dicts of them.
            purpose: of the waiting, for errors.
            store: where rank 0 keeps what comes.
        """
        self.check_together()
        if not self.is_leader:
            self.hear(purpose)  # user code of rank 0 may need this rank before it comes here
            entries = list(own.items())
            pieces = [
                entries[part] for part in in_pieces(_num_bytes(value) for _, value in entries)
            ]
            for piece in (*pieces, []):
                self.receive_from(0, purpose)
                self.send_to(0, piece)
                self.transport.flush()
            return {}
        found = dict(own)
        self.tell(None)
        for rank in range(1, self.num_ranks):
            self.send_to(rank, None)
            while piece := self.receive_from(rank, purpose):
                for key, value in piece:
                    found.setdefault(key, store(value))
                del piece, value  # before the next one comes
                self.send_to(rank, None)
        return found


def _num_bytes(value: Any) -> int:
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    dense = [leaf._values() if leaf.is_sparse else leaf for leaf in tensors]
    return sum(leaf.nbytes for leaf in dense)
