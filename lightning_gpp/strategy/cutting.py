"""Cutting the arguments of a call of the pipelined forward, and joining its outputs.

Arguments are cut into micro-batches along the dimensions that capture found to grow with the
samples, and the outputs of the micro-batches are joined again along theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gpp.capture.model import CapturedModel
from lightning_gpp.capture.structure import flatten
from lightning_gpp.runtime.pieces import cut

_RELATIVE_TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4}
_COARSE_TOLERANCE = 2e-2  # half precision

Dims = Mapping[str, tuple[int | None, ...]]
Values = Mapping[str, Any]


class CannotJoinError(ValueError):
    """The outputs of micro-batches do not make up the output of the whole batch."""


def batch_dims(captured: CapturedModel) -> Dims:
    """Value name -> dimension of the samples for each of its tensors."""
    return {
        name: tuple(spec.batch_dim for spec in value.tensors)
        for name, value in captured.graph.values.items()
    }


def call_size(inputs: Mapping[str, Tensor], dims: Dims) -> int | None:
    """Samples in one call of the forward; None where the inputs do not agree on it.

    >>> dims = {"x": (0,), "mask": (0,), "scale": (None,)}
    >>> call_size({"x": torch.ones(6, 2), "mask": torch.ones(6), "scale": torch.ones(2)}, dims)
    6
    """
    sizes = []
    for name, tensor in inputs.items():
        dim = dims[name][0]
        if dim is not None:
            if tensor.layout is not torch.strided or tensor.dim() <= dim:
                return None
            sizes.append(tensor.shape[dim])
    if not sizes or 0 in sizes:
        return None
    most_frequent = Counter(sizes).most_common(1)[0][0]
    return most_frequent if all(size % most_frequent == 0 for size in sizes) else None


def cut_inputs(
    inputs: Mapping[str, Tensor], dims: Dims, sizes: Sequence[int]
) -> list[dict[str, Tensor]]:
    """The arguments of each micro-batch; what is not per sample goes whole into each."""
    pieces: list[dict[str, Tensor]] = [{} for _ in sizes]
    for name, tensor in inputs.items():
        dim = dims[name][0]
        parts = [tensor] * len(sizes) if dim is None else cut(tensor, sizes, dim, name)
        for piece, part in zip(pieces, parts, strict=True):
            piece[name] = part
    return pieces


def join_values(outputs: Sequence[Values], dims: Dims, sizes: Sequence[int]) -> Values:
    """The outputs of the whole batch from those of its micro-batches.

    Raises:
        CannotJoinError: something that has no dimension of the samples differs between them.
    """
    return {
        name: _join([values[name] for values in outputs], dims.get(name, ()), sizes, name)
        for name in outputs[0]
    }


def _join(
    values: Sequence[Any], dims: Sequence[int | None], sizes: Sequence[int], name: str
) -> Any:
    flat = [flatten(value) for value in values]
    _, structure = flat[0]
    if any(other != structure for _, other in flat):
        raise CannotJoinError(f"output {name!r} differs in structure between micro-batches")
    of_tensors = iter(dims)
    joined = []
    for column in zip(*(found for found, _ in flat), strict=True):
        dim = next(of_tensors, None) if isinstance(column[0], Tensor) else None
        joined.append(_join_leaf(column, dim, sizes, name))
    return structure.unflatten(joined)


def _join_leaf(column: Sequence[Any], dim: int | None, sizes: Sequence[int], name: str) -> Any:
    first = column[0]
    if len(column) == 1:
        return first
    if isinstance(first, Tensor) and dim is not None:
        per_sample = first.shape[dim] // sizes[0]
        if all(t.shape[dim] == per_sample * size for t, size in zip(column, sizes, strict=True)):
            try:
                return torch.cat(list(column), dim=dim)
            except RuntimeError as error:
                raise CannotJoinError(f"output {name!r} cannot be joined: {error}") from None
    elif all(_is_same(value, first) for value in column):
        return first
    raise CannotJoinError(f"output {name!r} is not one entry per sample")


def _is_same(value: Any, first: Any) -> bool:
    if isinstance(first, Tensor):
        return isinstance(value, Tensor) and (_has_no_values(value) or torch.equal(value, first))
    return value is first or (type(value) is type(first) and bool(value == first))


def _has_no_values(tensor: Tensor) -> bool:
    """Whether only shapes are there (emulated devices can do with them): no value differs."""
    return tensor.is_meta


def difference(joined: Values, whole: Values) -> str | None:
    """In which output two results differ by more than rounding; None if in none."""
    for name, expected in whole.items():
        leaves, structure = flatten(expected)
        got, got_structure = flatten(joined[name])
        same = structure == got_structure and all(map(_is_close, got, leaves))
        if not same:
            return f"output {name!r} of a sample depends on the other samples of its batch"
    return None


def _is_close(got: Any, want: Any) -> bool:
    if not isinstance(want, Tensor) or not isinstance(got, Tensor):
        return _is_same(got, want)
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    if _has_no_values(got):
        return True
    if not (want.is_floating_point() or want.is_complex()):
        return torch.equal(got, want)
    tolerance = _RELATIVE_TOLERANCE.get(want.dtype, _COARSE_TOLERANCE)
    scale = float(want.abs().nan_to_num(0, 0, 0).max()) if want.numel() else 0.0
    return torch.allclose(got, want, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
