"""The fixed-size header that announces a message, so that shapes may change from step to step.

gloo kills a receiver whose buffer is too small, so the receiver must know the sizes first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gpp.runtime.payload import DTYPES, Payload
from lightning_gpp.runtime.transport import Tag

HEADER_LENGTH = 64
"""int64 numbers in the first header; a longer description follows in a second message."""

_MESSAGE, _GOODBYE = 1, 2
_FIXED = 8
_CODE = {dtype: code for code, dtype in enumerate(DTYPES)}
_NO_TENSOR = -1


@dataclass(frozen=True, slots=True)
class TensorHead:
    """Type and shape of a tensor that follows; ``dtype`` None when there is none."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class Header:
    """What the next messages on the wire are."""

    is_goodbye: bool
    tag: Tag
    structure_bytes: int
    tensors: tuple[TensorHead, ...]


def encode_header(payload: Payload, tag: Tag) -> tuple[Tensor, Tensor | None]:
    """The header of a message, and the rest of it where it does not fit."""
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
    if _FIXED + len(numbers) > HEADER_LENGTH:
        return _padded(fixed), torch.tensor(numbers, dtype=torch.int64)
    return _padded(fixed + numbers), None


def goodbye_header() -> Tensor:
    """The header that says that nothing more follows."""
    return _padded([_GOODBYE])


def rest_length(header: Tensor) -> int:
    """How many more numbers follow a first header in a message of their own."""
    length = int(header[_FIXED - 1])
    return length if _FIXED + length > HEADER_LENGTH else 0


def decode_header(header: Tensor, rest: Tensor | None = None) -> Header:
    """Reads a header."""
    fixed = header[:_FIXED].tolist()
    if fixed[0] == _GOODBYE:
        return Header(True, (0, 0, 0, 0), -1, ())
    numbers = rest.tolist() if rest is not None else header[_FIXED:].tolist()
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
    return Header(False, tag, fixed[5], tuple(heads))


def _padded(numbers: list[int]) -> Tensor:
    header = torch.zeros(HEADER_LENGTH, dtype=torch.int64)
    header[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
    return header
