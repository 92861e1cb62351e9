"""A message as bytes: a pickled head that says what it is, then its tensors.

gloo ends the process of a receiver whose buffer is too small, so a receiver must know sizes first:
it always waits for a *first part* of at most :data:`FIRST_BYTES` (a shorter one is fine). It holds
the tensors, too, where they fit; otherwise they follow one by one. Of a tensor on the ``meta``
device type and shape travel, and nothing follows.
"""

from __future__ import annotations

import math
import pickle
import struct
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from lightning_gpp.runtime.payload import Payload
from lightning_gpp.runtime.transport.transport import Tag

FIRST_BYTES = 1 << 18
"""Most bytes of a first part: what follows costs a message more, what is in it a copy more."""

_FIXED = struct.Struct("2q")
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class TensorHead:
    """Of a tensor in a message.

    Attributes:
        is_on_device: whether it belongs on the device of the receiver, and not on its CPU.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    is_meta: bool
    is_on_device: bool

    @property
    def num_bytes(self) -> int:
        """Size of the data."""
        return 0 if self.is_meta else math.prod(self.shape) * self.dtype.itemsize

    def empty(self, device: torch.device) -> Tensor:
        """Memory for it."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta" if self.is_meta else device)


@dataclass(slots=True)
class Head:
    """What a message is.

    Attributes:
        tag: of the message.
        structure: see :class:`~lightning_gpp.runtime.payload.Payload`, like ``requires_grad``.
        tensors: types and shapes; None where there is no tensor.
        holds_data: whether the tensors are in the first part.
    """

    tag: Tag
    structure: bytes | None
    requires_grad: list[bool]
    tensors: list[TensorHead | None]
    holds_data: bool = False


def has_data(tensor: Tensor | None) -> TypeGuard[Tensor]:
    """Whether a tensor of a payload has bytes to send."""
    return tensor is not None and not tensor.is_meta and tensor.numel() > 0


def encode(payload: Payload, tag: Tag, *, on_cpu: bool) -> list[Tensor]:
    """The parts of a message, of which the first one is bytes.

    Args:
        payload: of the message.
        tag: likewise.
        on_cpu: whether the sender computes on its CPU, so that what is there is on its device.
    """
    heads: list[tuple[object, ...] | None] = []
    data: list[Tensor] = []
    num_bytes, is_near = 0, True
    for tensor in payload.tensors:
        if tensor is None:
            heads.append(None)
            continue
        is_far = tensor.device.type != "cpu"
        is_on_device = not payload.is_control and (on_cpu or is_far)
        heads.append((tensor.dtype, tuple(tensor.shape), tensor.is_meta, is_on_device))
        if has_data(tensor):
            data.append(tensor)
            num_bytes += _aligned(tensor.nbytes)
            is_near = is_near and not is_far
    head = pickle.dumps((tag, payload.structure, payload.requires_grad, heads))
    start = _aligned(_FIXED.size + len(head))
    if is_near and start + num_bytes <= FIRST_BYTES:
        return [_first(head, data, start + num_bytes)]
    if start > FIRST_BYTES:
        follows = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        return [_first(b"", [], _FIXED.size, len(head)), follows, *map(_as_it_is, data)]
    return [_first(head, [], start), *map(_as_it_is, data)]


def _first(head: bytes, data: list[Tensor], num_bytes: int, follows: int = 0) -> Tensor:
    part = bytearray(num_bytes)
    _FIXED.pack_into(part, 0, follows or len(head), 2 if follows else int(bool(data)))
    part[_FIXED.size : _FIXED.size + len(head)] = head
    offset = _aligned(_FIXED.size + len(head))
    for tensor in data:
        _view(part, offset, tensor.dtype, tensor.shape).copy_(tensor)
        offset += _aligned(tensor.nbytes)
    return torch.frombuffer(part, dtype=torch.uint8)


GOODBYE = torch.frombuffer(bytearray(_FIXED.pack(0, 0)), dtype=torch.uint8)
"""A first part that says that nothing more follows."""


def head_that_follows(first: bytearray) -> int:
    """Bytes of a head that did not fit into the first part."""
    num_bytes, place = _FIXED.unpack_from(first)
    return num_bytes if place == 2 else 0


def decode(first: bytearray, follows: bytes | None = None) -> Head | None:
    """The head of a message; None of :data:`GOODBYE`."""
    num_bytes, place = _FIXED.unpack_from(first)
    if not num_bytes:
        return None
    found = follows or memoryview(first)[_FIXED.size : _FIXED.size + num_bytes]
    tag, structure, requires_grad, heads = pickle.loads(found)
    tensors = [None if each is None else TensorHead(*each) for each in heads]
    return Head(tag, structure, requires_grad, tensors, place == 1)


def data_in(first: bytearray, head: Head) -> list[Tensor | None]:
    """The tensors of a message that are in its first part, copied out of it."""
    found: list[Tensor | None] = [None] * len(head.tensors)
    if head.holds_data:
        start = _aligned(_FIXED.size + _FIXED.unpack_from(first)[0])
        sizes = [0 if each is None else _aligned(each.num_bytes) for each in head.tensors]
        data, offset = first[start : start + sum(sizes)], 0
        for place, (each, size) in enumerate(zip(head.tensors, sizes, strict=True)):
            if each is not None and size:
                found[place] = _view(data, offset, each.dtype, each.shape)
                offset += size
    return found


def _view(buffer: bytearray, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    count = math.prod(shape)
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset).view(shape)


def _as_it_is(tensor: Tensor) -> Tensor:
    """With its numbers in memory one after the other."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
