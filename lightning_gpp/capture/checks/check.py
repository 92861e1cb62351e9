"""Compares two results of a forward and its backward, and parameters before and after."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpp.capture.checks.rollback import Changes
from lightning_gpp.capture.errors import CaptureError
from lightning_gpp.capture.values.structure import flatten
from lightning_gpp.common.tensor_places import num_changes
from lightning_gpp.common.torch_device import types_in_use, widened

COARSE = 2e-2
"""In half precision (a unit in the last place of bfloat16 is 0.8 %)."""

_TF32 = 5e-3
"""In TF32 (a unit in the last place is 0.1 %)."""

_OTHER_SIZES = 1e-4
_OF_FLOAT32 = 1e-5


@dataclass(frozen=True, slots=True)
class Result:
    """The results of one forward, and of its backward if there was one.

    Attributes:
        output: what forward returned.
        gradients: by name of a parameter or input; None where there is none; empty without a
            backward.
        buffers: buffers after the forward, by name.
        changes: changes of the module, which were undone.
        draws: whether forward drew random numbers from torch.
    """

    output: Any
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    changes: Changes = field(default_factory=Changes)
    draws: bool = False


class ValuesDifferError(CaptureError):
    """Two results have the same form but other values.

    Attributes:
        is_large: whether the difference is larger than rounding in any precision.
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
    gradients, beside = expected.gradients, tuple(expected.gradients.values())
    for name, gradient in got.gradients.items():
        # Large terms may cancel into a small gradient, of which few digits are left.
        text = f"{what}: the gradient of {name!r}"
        _compare_leaf(gradients[name], gradient, text, beside)
    for name, buffer in expected.buffers.items():
        _compare_leaf(buffer, got.buffers[name], f"{what}: the buffer {name!r} after forward")


def _compare_leaf(expected: Any, got: Any, what: str, beside: Sequence[Any] = ()) -> None:
    """Compares two values; those beside it tell how large the terms are that cancel in it."""
    if not _is_alike(expected, got):
        raise CaptureError(f"{what} should be {_short(expected)}, is {_short(got)}")
    if (excess := _excess(expected, got, _OF_FLOAT32, beside)) is not None:
        error, scale = excess
        raise ValuesDifferError(
            f"{what} differs by {error:.3g} (its values go up to {scale:.3g})",
            is_large=not error <= COARSE * scale,
        )


def _is_alike(expected: Any, got: Any) -> bool:
    if isinstance(expected, Tensor) and isinstance(got, Tensor):
        return expected.shape == got.shape and expected.dtype == got.dtype
    return type(expected) is type(got) and (expected is got or bool(expected == got))


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return repr(value)


def is_close(got: Any, want: Any) -> bool:
    """Whether a value is what it should be, but for rounding in a batch of another size."""
    if not _is_alike(want, got) or not isinstance(want, Tensor):
        return _is_alike(want, got)
    return _excess(want, got, of_other_sizes(want.device)) is None


def _excess(
    expected: Any, got: Any, of_float32: float, beside: Sequence[Any] = ()
) -> tuple[float, float] | None:
    """By how much values that are alike differ, and how large they are; None if it is rounding."""
    if not isinstance(expected, Tensor) or expected.is_meta:
        return None  # of meta tensors shapes are all there is
    expected, got = _dense(expected), _dense(got)
    if torch.equal(expected, got):  # as it is nearly always
        return None
    if not (expected.is_floating_point() or expected.is_complex()):
        return math.inf, 0.0
    tolerance = relative_tolerance(expected.dtype, of_float32=of_float32)
    scale = _largest(expected)
    if torch.allclose(expected, got, rtol=tolerance, atol=tolerance * scale, equal_nan=True):
        return None
    error = (expected - got).abs().max().item()
    # Never by more than a few percent of itself, which a lost or doubled path would be.
    if beside and error <= min(COARSE * scale, tolerance * max(map(_largest, beside))):
        return None
    return error, scale


def _largest(value: Any) -> float:
    if not isinstance(value, Tensor) or not value.numel():
        return 0.0
    return _dense(value).abs().nan_to_num(0, 0, 0).max().item()


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


# Rounding: how far results may be apart that are the same otherwise ------------------------------


def relative_tolerance(dtype: torch.dtype, *, of_float32: float) -> float:
    """The largest difference, relative to the largest element, that rounding explains.

    Under autocast a result may be of float32 and have been rounded to half precision before.

    Args:
        dtype: of the results.
        of_float32: what is taken for rounding in float32, which depends on what is compared.

    >>> relative_tolerance(torch.float64, of_float32=1e-5)
    1e-09
    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     relative_tolerance(torch.float32, of_float32=1e-5)
    0.02
    """
    if dtype in (torch.float64, torch.complex128):
        return 1e-9  # not cast by autocast
    return of_float32 if dtype is torch.float32 and not is_autocast() else COARSE


def of_other_sizes(device: torch.device) -> float:
    """Relative rounding error in float32 between batches of different sizes.

    Other sizes are computed by other kernels. GPUs that can compute convolutions in TF32 unless
    told otherwise, and products of matrices if told.

    Args:
        device: that computed them.

    >>> of_other_sizes(torch.device("cpu"))
    0.0001
    """
    return _TF32 if is_tf32(device) else _OTHER_SIZES


def is_tf32(device: torch.device) -> bool:
    """Whether a device may compute in TF32 what is in float32."""
    if device.type != "cuda" or torch.version.hip:
        return False
    cudnn: Any = torch.backends.cudnn
    switches = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
    has_it = torch.cuda.get_device_capability(device)[0] >= 8
    return has_it and any(switch.fp32_precision == "tf32" for switch in switches)


def is_autocast() -> bool:
    """Whether computations are cast on any type of device."""
    return any(torch.is_autocast_enabled(kind) for kind in types_in_use())


# Parameters: a stage would repeat a change of them out of the optimizer's sight -----------------


def parameter_state(parameter: Tensor) -> str:
    """Another text after any change of a parameter, through ``.data`` too, or of another one."""
    with torch.no_grad():
        total = math.nan if parameter.is_meta else _total(parameter.detach())
    return repr((id(parameter), num_changes(parameter), parameter.data_ptr(), total))


def _total(tensor: Tensor) -> float:
    """A sum of all of a tensor: of its bits as whole numbers, which is exact and quick, if it can.

    It wraps around.
    """
    if tensor.layout is torch.strided and tensor.is_contiguous():
        size_bytes = tensor.numel() * tensor.element_size()
        if not size_bytes % 8 and not tensor.data_ptr() % 8:
            return int(tensor.view(-1).view(torch.int64).sum())
    return float(widened(tensor.abs()).sum())


@contextmanager
def unchanged_parameters(module: nn.Module) -> Iterator[None]:
    """Checks that the body leaves all parameters of a module as they are.

    Raises:
        CaptureError: the body changed or replaced one.
    """
    before = {name: parameter_state(item) for name, item in module.named_parameters()}
    yield
    after = {name: parameter_state(item) for name, item in module.named_parameters()}
    check_unchanged(n for n in before | after if before.get(n) != after.get(n))


def check_unchanged(changed: Iterable[str]) -> None:
    """Checks that there are no parameters that a forward changed.

    Raises:
        CaptureError: there are.
    """
    if names := ", ".join(map(repr, sorted(changed))):
        raise CaptureError(
            f"forward changes or replaces the parameters {names}; a pipeline would do so in every "
            "micro-batch. Make what forward updates a buffer (register_buffer). Bound parameters "
            "(clamp, normalize, max_norm) in a hook that runs on every rank: on_train_batch_start "
            "of a callback, or optimizer_step after the step"
        )
