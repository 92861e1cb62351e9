"""The first part of every message on the wire, so that shapes may change from step to step.

gloo kills a receiver whose buffer is too small, so the receiver must know the sizes first: it
always waits for a first part of at most :data:`FIRST_BYTES` (a shorter one is fine). The first part
says what the message is, and carries the data too where they fit; otherwise they follow one by one.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gpp.runtime.payload import DTYPES, Payload
from lightning_gpp.runtime.transport import Tag

FIRST_BYTES = 16384
"""Most bytes of a first part; gloo moves that many about as fast as one."""

_MESSAGE, _GOODBYE = 1, 2
_FIXED = 9
_ALIGNMENT = 16
_CODE = {dtype: code for code, dtype in enumerate(DTYPES)}
_NO_TENSOR = -1
_SHAPES_FOLLOW = -1


@dataclass(frozen=True, slots=True)
class TensorHead:
    """Type and shape of a tensor that follows; ``dtype`` None when there is none."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class Header:
    """What a message is.

    Attributes:
        is_goodbye: nothing more follows from this peer.
        tag: of the message.
        structure_bytes: length of the structure; -1 when there is none.
        data_offset: where structure and tensors begin in the first part; 0 when they follow.
        tensors: types and shapes.
    """

    is_goodbye: bool
    tag: Tag
    structure_bytes: int
    data_offset: int
    tensors: tuple[TensorHead, ...]


@dataclass(frozen=True, slots=True)
class FirstPart:
    """The first part of a message.

    Attributes:
        part: its bytes.
        holds_data: whether structure and tensors are in it.
        shapes: types and shapes, to follow as int64 numbers where even they do not fit.
    """

    part: Tensor
    holds_data: bool
    shapes: Tensor | None = None


def encode_first(payload: Payload, tag: Tag) -> FirstPart:
    """The first part of a message.

    Raises:
        TypeError: a tensor is of a type that cannot be sent.
    """
    numbers: list[int] = []
    for tensor, requires_grad in zip(payload.tensors, payload.requires_grad, strict=True):
        if tensor is None:
            numbers.append(_NO_TENSOR)
        elif tensor.dtype not in _CODE:
            raise TypeError(f"tensors of type {tensor.dtype} cannot cross between stages")
        else:
            numbers += [_CODE[tensor.dtype], int(requires_grad), tensor.dim(), *tensor.shape]
    size = len(payload.structure) if payload.structure is not None else -1
    fixed = [_MESSAGE, *tag, size, len(payload.tensors), len(numbers)]
    head_bytes = _aligned(8 * (_FIXED + len(numbers)))
    if head_bytes > FIRST_BYTES:
        return FirstPart(_tensor_of([*fixed, _SHAPES_FOLLOW]), False, torch.tensor(numbers))
    total = head_bytes + _aligned(max(size, 0))
    total += sum(_aligned(tensor.nbytes) for tensor in payload.tensors if tensor is not None)
    if total > FIRST_BYTES:
        return FirstPart(_tensor_of([*fixed, 0, *numbers]), False)
    return FirstPart(_with_data(payload, [*fixed, head_bytes, *numbers], head_bytes, total), True)


def _with_data(payload: Payload, numbers: list[int], offset: int, total: int) -> Tensor:
    """A first part that holds the data from ``offset`` on."""
    buffer = bytearray(total)
    struct.pack_into(f"{len(numbers)}q", buffer, 0, *numbers)
    if payload.structure is not None:
        buffer[offset : offset + len(payload.structure)] = payload.structure
        offset += _aligned(len(payload.structure))
    for tensor in payload.tensors:
        if tensor is not None and tensor.numel():
            data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            buffer[offset : offset + tensor.nbytes] = data.data
            offset += _aligned(tensor.nbytes)
    return torch.frombuffer(buffer, dtype=torch.uint8)


def goodbye() -> Tensor:
    """The first part that says that nothing more follows."""
    return _tensor_of([_GOODBYE] + [0] * (_FIXED - 1))


def shapes_that_follow(first: Tensor) -> int:
    """How many numbers of types and shapes follow a first part; 0 when they are in it."""
    fixed = _numbers(first, 0, _FIXED)
    return fixed[7] if fixed[8] == _SHAPES_FOLLOW else 0


def decode_first(first: Tensor, shapes: Tensor | None = None) -> Header:
    """Reads a first part, with the shapes that followed it if any did."""
    fixed = _numbers(first, 0, _FIXED)
    if fixed[0] == _GOODBYE:
        return Header(True, (0, 0, 0, 0), -1, 0, ())
    numbers = _numbers(first, _FIXED, fixed[7]) if shapes is None else shapes.tolist()
    heads = []
    position = 0
    for _ in range(fixed[6]):
        code = numbers[position]
        if code == _NO_TENSOR:
            heads.append(TensorHead(None, (), False))
            position += 1
        else:
            dims = numbers[position + 2]
            shape = tuple(numbers[position + 3 : position + 3 + dims])
            heads.append(TensorHead(DTYPES[code], shape, bool(numbers[position + 1])))
            position += 3 + dims
    tag = (fixed[1], fixed[2], fixed[3], fixed[4])
    return Header(False, tag, fixed[5], max(fixed[8], 0), tuple(heads))


def decode_data(first: Tensor, header: Header) -> Payload:
    """The payload of a message whose data are in its first part."""
    offset = header.data_offset
    structure = None
    if header.structure_bytes >= 0:
        structure = first[offset : offset + header.structure_bytes].numpy().tobytes()
        offset += _aligned(header.structure_bytes)
    tensors: list[Tensor | None] = []
    for head in header.tensors:
        if head.dtype is None:
            tensors.append(None)
            continue
        num_bytes = math.prod(head.shape) * head.dtype.itemsize
        data = first[offset : offset + num_bytes].view(head.dtype)
        tensors.append(data.reshape(head.shape).clone())  # storages of their own
        offset += _aligned(num_bytes)
    return Payload(tensors, [head.requires_grad for head in header.tensors], structure)


def _tensor_of(numbers: list[int]) -> Tensor:
    return torch.frombuffer(bytearray(struct.pack(f"{len(numbers)}q", *numbers)), dtype=torch.uint8)


def _numbers(first: Tensor, start: int, count: int) -> tuple[int, ...]:
    return struct.unpack_from(f"{count}q", first.numpy().data, 8 * start)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
