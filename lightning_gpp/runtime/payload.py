"""The content of a message: tensors, and how to build the values from them."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from lightning_gpp.common.host_copies import to_host
from lightning_gpp.runtime.device_copies import Arrival


@dataclass(slots=True)
class Payload:
    """The content of one message.

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


def tensors_in(values: Sequence[Any]) -> list[Tensor]:
    """The tensors in some values, in the order in which gradients of them travel."""
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
    tensors, structure = values, None
    for value in values:
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            tensors, structure = _pickled(pytree.tree_map(_alias, list(values)))
            break
    plain: list[Tensor | None] = []
    flags: list[bool] = []
    for tensor in tensors:
        plain.append(tensor.detach())
        flags.append(tensor.requires_grad)
    return Payload(plain, flags, structure)


def pack_gradients(gradients: Sequence[Tensor | None]) -> Payload:
    """The message that carries gradients, some of which may not exist."""
    return Payload(list(gradients), [False] * len(gradients))


def pack_object(obj: object) -> Payload:
    """The message that carries any object that can be pickled; no gradient comes back for it.

    Its tensors travel beside it, wherever they are in it, and are on the CPU afterwards. A tensor
    that is in it twice is one tensor afterwards.
    """
    tensors, structure = _pickled(obj)
    asked = [tensor.requires_grad for tensor in tensors]
    return Payload([*to_host(tensors)], asked, structure, is_control=True)


def unpack(payload: Payload) -> Any:
    """The values, or the object, of a message.

    Its tensors are leaves that nobody else has, which require a gradient where asked for.
    """
    if payload.arrival is not None:
        payload.settle()
    leaves: list[Tensor | None] = []
    for tensor, requires_grad in zip(payload.tensors, payload.requires_grad, strict=True):
        leaf = tensor if tensor is None else tensor.detach()
        if requires_grad and leaf is not None:
            leaf.requires_grad_()
        leaves.append(leaf)
    return leaves if payload.structure is None else _Unpickler(payload.structure, leaves).load()


def _alias(leaf: Any) -> Any:
    """A tensor object of its own: of values each tensor travels, also one that is there twice."""
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _pickled(obj: object) -> tuple[list[Tensor], bytes]:
    """The tensors in an object, and the object without them."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(obj)
    return pickler.tensors, file.getvalue()


class _Pickler(pickle.Pickler):
    """Pickles what is asked for, its tensors apart."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []

    def reducer_override(self, obj: Any) -> Any:
        """How a tensor is pickled: as its number; everything else as always."""
        if isinstance(obj, PackedSequence):
            return _packed, tuple(obj)
        if not isinstance(obj, Tensor):
            return NotImplemented
        if obj.layout is torch.sparse_coo:
            obj = obj.detach()
            return _sparse, (obj._indices(), obj._values(), tuple(obj.shape), obj.is_coalesced())
        if obj.layout is not torch.strided:
            return NotImplemented
        self.tensors.append(obj)
        return _tensor, (len(self.tensors) - 1,)


class _Unpickler(pickle.Unpickler):
    """The other way round.

    Args:
        structure: what :class:`_Pickler` wrote.
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
    raise pickle.UnpicklingError(f"tensor {index} travels beside the object; use unpack")


def _packed(data: Tensor, batch_sizes: Tensor, *indices: Tensor | None) -> PackedSequence:
    return PackedSequence(data, batch_sizes.cpu(), *indices)  # sizes are for the host


def _sparse(indices: Tensor, values: Tensor, shape: tuple[int, ...], is_coalesced: bool) -> Tensor:
    return torch.sparse_coo_tensor(
        indices, values, shape, is_coalesced=is_coalesced, check_invariants=False
    )
