"""Cutting and joining values where stages use micro-batches of different sizes.

A message on an edge carries the smaller of the two micro-batches: the stage with the larger one
cuts what it sends and joins what it receives, along the dimension that grows with the samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def cut(
    tensor: Tensor, sizes: Sequence[int], batch_dim: int | None, name: str
) -> tuple[Tensor, ...]:
    """Cuts a tensor of several micro-batches into one per micro-batch.

    Args:
        tensor: holds ``sum(sizes)`` samples, each the same number of entries of ``batch_dim``.
        sizes: samples of each micro-batch.
        batch_dim: the dimension of the samples.
        name: of the value, for the error text.

    Shapes:
        - tensor: ``(..., sum(sizes) * k, ...)``
        - returns: ``(..., sizes[i] * k, ...)`` for every i

    Raises:
        ValueError: the tensor has no such dimension, or its size is not a multiple of the samples.

    >>> [piece.tolist() for piece in cut(torch.arange(6), [1, 2], batch_dim=0, name="x")]
    [[0, 1], [2, 3, 4, 5]]
    """
    if len(sizes) == 1:
        return (tensor,)
    samples = sum(sizes)
    if batch_dim is None or tensor.dim() <= batch_dim or tensor.shape[batch_dim] % samples:
        raise ValueError(
            f"value {name!r} of shape {tuple(tensor.shape)} cannot be cut into micro-batches of "
            f"{list(sizes)} samples; give the stages on both sides the same microbatch_multiple"
        )
    per_sample = tensor.shape[batch_dim] // samples
    return torch.split(tensor, [size * per_sample for size in sizes], dim=batch_dim)


def join(
    pieces: Sequence[Tensor | None], sizes: Sequence[int], batch_dim: int | None, name: str
) -> Tensor | None:
    """Joins what :func:`cut` has cut; missing pieces (gradients that do not exist) are zero.

    Raises:
        ValueError: there are several pieces but no dimension to join them along.
    """
    if len(pieces) == 1:
        return pieces[0]
    found = next((piece for piece in pieces if piece is not None), None)
    if found is None:
        return None
    if batch_dim is None:
        raise ValueError(
            f"value {name!r} does not grow with the samples, so stages of different micro-batch "
            "sizes cannot exchange it; give them the same microbatch_multiple"
        )
    known = next(i for i, piece in enumerate(pieces) if piece is not None)
    per_sample = found.shape[batch_dim] // sizes[known]
    whole = []
    for piece, size in zip(pieces, sizes, strict=True):
        if piece is None:
            shape = list(found.shape)
            shape[batch_dim] = size * per_sample
            piece = found.new_zeros(shape)
        whole.append(piece)
    return torch.cat(whole, dim=batch_dim)
