"""A message as bytes: numbers that say what it is, then its structure and its tensors.

Of a tensor on the ``meta`` device the shape and type travel, and nothing follows.

Used by every transport that crosses processes. All parts begin at multiples of
:data:`ALIGNMENT` bytes, so that a tensor can be used where it lies.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeGuard

import torch
from torch import Tensor

from lightning_gpp.runtime.payload import DTYPES, Payload
from lightning_gpp.runtime.transport.transport import Tag

ALIGNMENT = 64
"""Bytes; a cache line, and what vector instructions like."""

NUM_FIXED = 7
"""Numbers at the beginning of a description: tag, structure size, tensors, shape numbers."""

_CODE = {dtype: code for code, dtype in enumerate(DTYPES)}
_NO_TENSOR = -1
_REQUIRES_GRAD, _IS_META, _IS_ON_DEVICE = 1, 2, 4


@dataclass(frozen=True, slots=True)
class TensorHead:
    """Type and shape of a tensor; ``dtype`` None when there is none.

    Attributes:
        is_on_device: whether it belongs on the device of the receiver, and not on its CPU.
    """

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    requires_grad: bool
    is_meta: bool = False
    is_on_device: bool = False

    @property
    def num_bytes(self) -> int:
        """Size of the data."""
        if self.dtype is None or self.is_meta:
            return 0
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Description:
    """What a message is.

    Attributes:
        tag: of the message.
        structure_bytes: length of the structure; -1 when there is none.
        tensors: types and shapes.
    """

    tag: Tag
    structure_bytes: int
    tensors: tuple[TensorHead, ...]


def describe(payload: Payload, tag: Tag, *, on_cpu: bool) -> tuple[list[int], list[int]]:
    """The description of a message as numbers: :data:`NUM_FIXED` ones, and those of the shapes.

    Args:
        payload: of the message.
        tag: likewise.
        on_cpu: whether the sender computes on its CPU, so that what is there is on its device.

    Raises:
        TypeError: a tensor is of a type that cannot be sent.
    """
    shapes: list[int] = []
    for tensor, requires_grad in zip(payload.tensors, payload.requires_grad, strict=True):
        if tensor is None:
            shapes.append(_NO_TENSOR)
        elif tensor.dtype not in _CODE:
            raise TypeError(f"tensors of type {tensor.dtype} cannot cross between stages")
        else:
            is_on_device = not payload.is_control and (on_cpu or tensor.device.type != "cpu")
            flags = requires_grad * _REQUIRES_GRAD + tensor.is_meta * _IS_META
            flags += is_on_device * _IS_ON_DEVICE
            shapes += [_CODE[tensor.dtype], flags, tensor.dim(), *tensor.shape]
    size = len(payload.structure) if payload.structure is not None else -1
    return [*tag, size, len(payload.tensors), len(shapes)], shapes


def understand(fixed: Sequence[int], shapes: tuple[int, ...]) -> Description:
    """The description that :func:`describe` turned into numbers."""
    return Description((fixed[0], fixed[1], fixed[2], fixed[3]), fixed[4], _heads(fixed[5], shapes))


@lru_cache(maxsize=1024)  # the same messages come in every step
def _heads(count: int, shapes: tuple[int, ...]) -> tuple[TensorHead, ...]:
    """Types and shapes of so many tensors."""
    heads = []
    position = 0
    for _ in range(count):
        code = shapes[position]
        if code == _NO_TENSOR:
            heads.append(TensorHead(None, (), False))
            position += 1
        else:
            dims = shapes[position + 2]
            shape = tuple(shapes[position + 3 : position + 3 + dims])
            flags = shapes[position + 1]
            bits = (_REQUIRES_GRAD, _IS_META, _IS_ON_DEVICE)
            heads.append(TensorHead(DTYPES[code], shape, *(bool(flags & bit) for bit in bits)))
            position += 3 + dims
    return tuple(heads)


def data_bytes(payload: Payload) -> int:
    """Bytes that structure and tensors take."""
    structure = 0 if payload.structure is None else aligned(len(payload.structure))
    return structure + sum(aligned(tensor.nbytes) for tensor in payload.tensors if has_data(tensor))


def has_data(tensor: Tensor | None) -> TypeGuard[Tensor]:
    """Whether a tensor of a payload has bytes to send."""
    return tensor is not None and not tensor.is_meta and tensor.numel() > 0


def write_data(payload: Payload, buffer: bytearray | memoryview, offset: int) -> None:
    """Copies structure and tensors into a buffer, from ``offset`` on."""
    if payload.structure is not None:
        buffer[offset : offset + len(payload.structure)] = payload.structure
        offset += aligned(len(payload.structure))
    for tensor in payload.tensors:
        if has_data(tensor):
            count = tensor.numel()
            place = torch.frombuffer(buffer, dtype=tensor.dtype, count=count, offset=offset)
            place.view(tensor.shape).copy_(tensor)
            offset += aligned(tensor.nbytes)


def read_data(buffer: bytearray | memoryview, offset: int, description: Description) -> Payload:
    """The payload whose structure and tensors lie in a buffer, which the tensors keep alive.

    Args:
        buffer: writable bytes.
        offset: where the data begin.
        description: what they are.
    """
    structure = None
    if description.structure_bytes >= 0:
        structure = bytes(buffer[offset : offset + description.structure_bytes])
        offset += aligned(description.structure_bytes)
    tensors: list[Tensor | None] = []
    for head in description.tensors:
        tensors.append(_read_tensor(buffer, offset, head))
        offset += aligned(head.num_bytes)
    return Payload(tensors, [head.requires_grad for head in description.tensors], structure)


def _read_tensor(buffer: bytearray | memoryview, offset: int, head: TensorHead) -> Tensor | None:
    if head.dtype is None:
        return None
    count = math.prod(head.shape)
    if head.is_meta or not count:
        return torch.empty(head.shape, dtype=head.dtype, device="meta" if head.is_meta else "cpu")
    return torch.frombuffer(buffer, dtype=head.dtype, count=count, offset=offset).view(head.shape)


def in_one_piece(
    kind: int, payload: Payload, fixed: Sequence[int], shapes: Sequence[int]
) -> bytearray:
    """A small message: its kind, how many bytes it has, its description and its data.

    Args:
        kind: of whoever sends it.
        payload: of the message.
        fixed: what :func:`describe` says of it.
        shapes: likewise.
    """
    num_bytes = piece_bytes(payload, shapes)
    piece = bytearray(num_bytes)
    numbers = [kind, num_bytes, *fixed, *shapes]
    struct.pack_into(f"{len(numbers)}q", piece, 0, *numbers)
    write_data(payload, piece, _head_bytes(len(shapes)))
    return piece


def piece_bytes(payload: Payload, shapes: Sequence[int]) -> int:
    """How many bytes a message takes in one piece."""
    return _head_bytes(len(shapes)) + data_bytes(payload)


def _head_bytes(num_shapes: int) -> int:
    """Where the data of a message in one piece begin."""
    return aligned(8 * (2 + NUM_FIXED + num_shapes))


def out_of_one_piece(piece: bytearray) -> tuple[Description, Payload]:
    """What :func:`in_one_piece` has packed; tensors lie in the piece itself."""
    _, _, *fixed = bytes_to_numbers(piece, 0, 2 + NUM_FIXED)
    description = understand(fixed, bytes_to_numbers(piece, 2 + NUM_FIXED, fixed[-1]))
    return description, read_data(piece, _head_bytes(fixed[-1]), description)


def numbers_to_bytes(numbers: Sequence[int]) -> bytearray:
    """Eight bytes per number."""
    return bytearray(struct.pack(f"{len(numbers)}q", *numbers))


def bytes_to_numbers(buffer: bytearray | memoryview, first: int, count: int) -> tuple[int, ...]:
    """``count`` numbers from the ``first`` on."""
    return struct.unpack_from(f"{count}q", buffer, 8 * first)


def aligned(num_bytes: int) -> int:
    """Rounded up to the alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
