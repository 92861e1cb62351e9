"""Are two results of a forward and its backward the same?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpp.capture.checks.rounding import COARSE, relative_tolerance
from lightning_gpp.capture.checks.tape import Tape
from lightning_gpp.capture.errors import CaptureError
from lightning_gpp.capture.values.samples import Sample
from lightning_gpp.capture.values.structure import flatten
from lightning_gpp.common.mapped_tensor import is_mapped, mapped

_OF_FLOAT32 = 1e-5


@dataclass(frozen=True, slots=True)
class Result:
    """What one forward gave, and its backward if there was one.

    Attributes:
        output: of forward.
        gradients: by parameter or input name; None where there is none. Empty without a backward.
            Of a parameter that lies in a file weighted sums of it.
        buffers: by name, after the forward.
        changed: qualified names of the plain attributes that forward changed.
        kept: those of them that now hold a tensor which gradients flow through.
        draws: whether forward drew random numbers from torch.
        tape: what forward called, if it was the module's own and could be taped.
    """

    output: Any
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    changed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    draws: bool = False
    tape: Tape | None = None


class ValuesDifferError(CaptureError):
    """Two results have the same form and other values.

    Attributes:
        is_large: whether by more than rounding can explain in any precision.
    """

    def __init__(self, text: str, *, is_large: bool) -> None:
        super().__init__(text)
        self.is_large = is_large


def compare(expected: Result, got: Result, what: str) -> None:
    """Compares two results.

    Raises:
        CaptureError: they differ; the message says in what and how much.
        ValuesDifferError: likewise, in values only.
    """
    leaves, structure = flatten(expected.output)
    got_leaves, got_structure = flatten(got.output)
    if structure != got_structure:
        raise CaptureError(
            f"{what}: forward returns {structure}, the captured graph {got_structure}"
        )
    for path, leaf, got_leaf in zip(structure.paths(), leaves, got_leaves, strict=True):
        place = f" {[step.key for step in path]}" if path else ""
        _compare_leaf(leaf, got_leaf, f"{what}: output{place}")
    for name, gradient in expected.gradients.items():
        _compare_leaf(gradient, got.gradients[name], f"{what}: the gradient of {name!r}")
    for name, buffer in expected.buffers.items():
        _compare_leaf(buffer, got.buffers[name], f"{what}: the buffer {name!r} after forward")


def _compare_leaf(expected: Any, got: Any, what: str) -> None:
    if not isinstance(expected, Tensor) or not isinstance(got, Tensor):
        if type(expected) is not type(got) or (expected is not got and expected != got):
            raise CaptureError(f"{what} should be {_short(expected)}, is {_short(got)}")
        return
    if expected.shape != got.shape or expected.dtype != got.dtype:
        raise CaptureError(f"{what} should be {_short(expected)}, is {_short(got)}")
    if expected.is_meta:
        return  # shapes are all there is; ``capture`` says so
    if expected.layout is not torch.strided:
        expected, got = expected.to_dense(), got.to_dense()
    if torch.equal(expected, got):  # as it is nearly always
        return
    if not (expected.is_floating_point() or expected.is_complex()):
        raise CaptureError(f"{what} differs")
    tolerance = relative_tolerance(expected.dtype, of_float32=_OF_FLOAT32)
    scale = expected.abs().nan_to_num(0, 0, 0).max().item() if expected.numel() else 0.0
    if not torch.allclose(expected, got, rtol=tolerance, atol=tolerance * scale, equal_nan=True):
        error = (expected - got).abs().max().item()
        raise ValuesDifferError(
            f"{what} differs by {error:.3g} (its values go up to {scale:.3g})",
            is_large=not error <= COARSE * scale,
        )


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return repr(value)


@contextmanager
def in_float64(module: nn.Module) -> Iterator[None]:
    """The module computes in float64 as far as its own tensors decide that."""
    buffers = [
        (part._buffers, name, buffer)
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    values = [(parameter, parameter.data) for parameter in module.parameters()]
    try:
        for parameter, value in values:
            parameter.data = _as_float64(value)
        for table, name, buffer in buffers:
            table[name] = _as_float64(buffer)
        yield
    finally:
        for parameter, value in values:
            parameter.data = value
        for table, name, buffer in buffers:
            table[name] = buffer


def sample_in_float64(sample: Sample) -> Sample:
    """The same inputs in float64."""
    tensors = {
        name: _as_float64(tensor.detach()).requires_grad_(tensor.requires_grad)
        for name, tensor in sample.tensors.items()
    }
    return replace(sample, tensors=tensors)


def _as_float64(tensor: Tensor) -> Tensor:
    double = tensor.double() if tensor.is_floating_point() else tensor
    return mapped(double) if is_mapped(tensor) else double
