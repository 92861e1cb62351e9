"""What one message carries: the tensors of some values, and how to put the values together."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from lightning_gpp.common.host_copies import to_host
from lightning_gpp.runtime.device_copies import Arrival


@dataclass(slots=True)
class Payload:
    """A message.

    Attributes:
        tensors: detached tensors in a fixed order; None where there is nothing to send (a gradient
            that does not exist).
        requires_grad: for each tensor whether the receiver has to send a gradient back.
        structure: pickled form of values that are not single tensors; None when all are.
        is_control: whether its tensors are on the CPU and stay there, on whatever device ranks are.
        arrival: when its tensors are complete; None where they are.
    """

    tensors: list[Tensor | None]
    requires_grad: list[bool]
    structure: bytes | None = None
    is_control: bool = False
    arrival: Arrival | None = None

    def settle(self) -> Payload:
        """Makes this thread's stream wait until the tensors are complete; the payload itself."""
        if self.arrival is not None:
            self.arrival.wait()
            self.arrival = None
        return self

    @classmethod
    def nothing(cls) -> Payload:
        """In the place of values, where there are none because a forward has failed."""
        return cls([], [], _NOTHING)

    @property
    def is_nothing(self) -> bool:
        """Whether it is that of :meth:`nothing`; some edges have no values and are not."""
        return self.structure == _NOTHING

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors if tensor is not None)


_NOTHING = b"nothing"  # which pickles no structure


@dataclass(frozen=True, slots=True)
class _Slot:
    """Stands for the tensor at ``index`` in a pickled structure."""

    index: int


class _SparseParts(NamedTuple):
    """A sparse tensor taken apart into tensors that can travel."""

    indices: Tensor
    values: Tensor
    shape: tuple[int, ...]
    is_coalesced: bool


class _PackedParts(NamedTuple):
    """A ``PackedSequence`` as a tuple that may hold anything; the real one asks for tensors."""

    data: Tensor
    batch_sizes: Tensor
    sorted_indices: Tensor | None
    unsorted_indices: Tensor | None


def tensors_in(values: Sequence[Any]) -> list[Tensor]:
    """The tensors in some values, in the order in which a payload carries them."""
    for value in values:
        if not isinstance(value, Tensor):
            break
    else:
        return list(values)
    return [leaf for leaf in pytree.tree_leaves(list(values)) if isinstance(leaf, Tensor)]


def copies(value: Any) -> Any:
    """A value whose tensors are copies, joined to the originals by autograd."""
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, value)


def pack(values: Sequence[Any]) -> Payload:
    """The message that carries ``values``, cut off from the autograd graph."""
    for value in values:
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            break
    else:
        return _beside(values, None)
    values = pytree.tree_map(
        _taken_apart, list(values), is_leaf=lambda leaf: isinstance(leaf, PackedSequence)
    )
    tensors = tensors_in(values)
    structure = None
    if not all(isinstance(value, Tensor) for value in values):
        counter = iter(range(len(tensors)))
        structure = pickle.dumps(
            pytree.tree_map(
                lambda leaf: _Slot(next(counter)) if isinstance(leaf, Tensor) else leaf,
                list(values),
            )
        )
    return _beside(tensors, structure)


def _beside(tensors: Sequence[Tensor], structure: bytes | None) -> Payload:
    """The message of some tensors, cut off from the autograd graph, and a pickled structure."""
    return Payload([t.detach() for t in tensors], [t.requires_grad for t in tensors], structure)


def pack_gradients(gradients: Sequence[Tensor | None]) -> Payload:
    """The message that carries gradients, some of which may not exist."""
    return Payload(list(gradients), [False] * len(gradients))


class _ObjectPickler(pickle.Pickler):
    """Pickles what is asked for, its tensors apart."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []

    def reducer_override(self, obj: Any) -> Any:
        """How a tensor is pickled: as its number; everything else as always."""
        if not isinstance(obj, Tensor):
            return NotImplemented
        if obj.layout is torch.sparse_coo:
            return _sparse, tuple(_taken_apart(obj))
        if obj.layout is not torch.strided:
            return NotImplemented
        self.tensors.append(obj)
        return _tensor, (len(self.tensors) - 1,)


class _ObjectUnpickler(pickle.Unpickler):
    """The other way round.

    Args:
        structure: what :class:`_ObjectPickler` wrote.
        tensors: of the object.
    """

    def __init__(self, structure: bytes, tensors: Sequence[Tensor | None]) -> None:
        super().__init__(io.BytesIO(structure))
        self._tensors = tensors

    def find_class(self, module: str, name: str, /) -> Any:
        """What a name stands for."""
        if module == __name__ and name == _tensor.__name__:
            return self._tensors.__getitem__
        return super().find_class(module, name)


def _tensor(index: int) -> Tensor:
    """Stands for the tensor at ``index`` in a pickled object."""
    raise pickle.UnpicklingError(f"tensor {index} travels beside the object; use unpack_object")


def _sparse(*parts: Any) -> Tensor:
    return _put_together(_SparseParts(*parts))  # type: ignore[no-any-return]


def pack_object(obj: object) -> Payload:
    """The message that carries any object that can be pickled; no gradient comes back for it.

    Its tensors travel beside it, wherever they are in it, and are on the CPU afterwards. Much
    faster than :func:`pack` where there is more to an object than tensors, and a tensor that is in
    it twice is one tensor afterwards.
    """
    file = io.BytesIO()
    pickler = _ObjectPickler(file)
    pickler.dump(obj)
    asked = [tensor.requires_grad for tensor in pickler.tensors]
    return Payload([*to_host(pickler.tensors)], asked, file.getvalue(), is_control=True)


def _leaves(payload: Payload) -> list[Tensor | None]:
    """Tensors of a message that nobody else has, which require a gradient where asked for."""
    leaves = [tensor if tensor is None else tensor.detach() for tensor in payload.tensors]
    for leaf, requires_grad in zip(leaves, payload.requires_grad, strict=True):
        if requires_grad and leaf is not None:
            leaf.requires_grad_()
    return leaves


def unpack(payload: Payload) -> list[Any]:
    """The values of a message; its tensors are leaves that require a gradient where asked for."""
    if payload.arrival is not None:
        payload.settle()
    leaves = _leaves(payload)
    if payload.structure is None:
        return leaves
    values: list[Any] = pytree.tree_map(
        lambda leaf: leaves[leaf.index] if isinstance(leaf, _Slot) else leaf,
        pickle.loads(payload.structure),
    )
    return pytree.tree_map(  # type: ignore[no-any-return]
        _put_together, values, is_leaf=lambda part: isinstance(part, _SparseParts | _PackedParts)
    )


def _taken_apart(leaf: Any) -> Any:
    if isinstance(leaf, PackedSequence):
        return _PackedParts(*leaf)
    if not (isinstance(leaf, Tensor) and leaf.layout is torch.sparse_coo):
        return leaf
    leaf = leaf.detach()
    return _SparseParts(leaf._indices(), leaf._values(), tuple(leaf.shape), leaf.is_coalesced())


def _put_together(part: Any) -> Any:
    if isinstance(part, _PackedParts):  # sizes are numbers for the host, as torch has them
        return PackedSequence(part.data, part.batch_sizes.cpu(), *part[2:])
    if not isinstance(part, _SparseParts):
        return part
    return torch.sparse_coo_tensor(
        part.indices,
        part.values,
        part.shape,
        is_coalesced=part.is_coalesced,
        check_invariants=False,
    )


def unpack_object(payload: Payload) -> Any:
    """The object of a message made by :func:`pack_object`."""
    assert payload.structure is not None
    return _ObjectUnpickler(payload.structure, _leaves(payload)).load()
