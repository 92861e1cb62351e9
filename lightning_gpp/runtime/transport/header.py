"""The first part of every message over a process group, so that shapes may change at any time.

gloo kills a receiver whose buffer is too small, so the receiver must know the sizes first: it
always waits for a first part of at most :data:`FIRST_BYTES` (a shorter one is fine). The first part
says what the message is, and carries the data too where they fit; otherwise they follow one by one.

A first part begins with the number of its message among all that its sender has for this receiver:
some of them may come on another way (:mod:`~lightning_gpp.runtime.transport.lines`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gpp.runtime.payload import Payload
from lightning_gpp.runtime.transport.message import (
    NUM_FIXED,
    Description,
    aligned,
    bytes_to_numbers,
    in_one_piece,
    numbers_to_bytes,
    piece_bytes,
    understand,
)

FIRST_BYTES = 16384
"""Most bytes of a first part; gloo moves that many about as fast as one."""

_SHAPES_FOLLOW = -1
_BEFORE_SHAPES = 2 + NUM_FIXED  # number, bytes of the message, the fixed numbers


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


def encode_first(
    payload: Payload, fixed: Sequence[int], shapes: Sequence[int], number: int, *, is_far: bool
) -> FirstPart:
    """The first part of a message.

    Args:
        payload: of the message.
        fixed: what :func:`~lightning_gpp.runtime.transport.message.describe` says of it.
        shapes: likewise.
        number: of the message.
        is_far: whether some of its data are not in the memory of the CPU.
    """
    head_bytes = aligned(8 * (_BEFORE_SHAPES + len(shapes)))
    if head_bytes > FIRST_BYTES:
        part = numbers_to_bytes([number, _SHAPES_FOLLOW, *fixed])
        return FirstPart(_tensor_of(part), False, torch.tensor(shapes, device="cpu"))
    if is_far or piece_bytes(payload, shapes) > FIRST_BYTES:
        part = numbers_to_bytes([number, 0, *fixed, *shapes])
        return FirstPart(_tensor_of(part), False)
    return FirstPart(_tensor_of(in_one_piece(number, payload, fixed, shapes)), True)


def goodbye(number: int) -> Tensor:
    """The first part that says that nothing more follows, with a number as if it were a message."""
    return _tensor_of(numbers_to_bytes([~number] + [0] * (_BEFORE_SHAPES - 1)))


def head_of(first: bytearray) -> tuple[int, ...]:
    """The numbers that every first part begins with."""
    return bytes_to_numbers(first, 0, _BEFORE_SHAPES)


def is_goodbye(head: tuple[int, ...]) -> bool:
    """Whether a first part says that nothing more follows."""
    return head[0] < 0


def number_of(head: tuple[int, ...]) -> int:
    """The number of the message or goodbye."""
    return ~head[0] if is_goodbye(head) else head[0]


def bytes_of_all(head: tuple[int, ...]) -> int:
    """How many bytes of a first part are the message, with its data; 0 where these follow."""
    return max(0, head[1])


def shapes_that_follow(head: tuple[int, ...]) -> int:
    """How many numbers of types and shapes follow a first part; 0 when they are in it."""
    return head[-1] if head[1] == _SHAPES_FOLLOW else 0


def decode_first(
    first: bytearray, head: tuple[int, ...], shapes: Tensor | None = None
) -> Description:
    """Reads a first part, with the shapes that followed it if any did."""
    if shapes is not None:
        return understand(head[2:], tuple(shapes.tolist()))
    return understand(head[2:], bytes_to_numbers(first, _BEFORE_SHAPES, head[-1]))


def _tensor_of(part: bytearray) -> Tensor:
    return torch.frombuffer(part, dtype=torch.uint8)
