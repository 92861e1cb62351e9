"""Compares nested results: the same types and structure, numbers equal up to rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def differences(got: Any, want: Any, place: str = "", tolerance: float = 1e-9) -> list[str]:
    """One line for everything in which two nested values differ.

    Args:
        got: what was found.
        want: what was expected.
        place: of the values, for the text.
        tolerance: for numbers, relative to the largest element (or 1, if that is larger).

    >>> differences({"a": [1.0, 2]}, {"a": [1.0, 3]}, "metrics")
    ["metrics['a'][1]: got 2, expected 3"]
    """
    return list(_lines(got, want, place, tolerance))


def _lines(got: Any, want: Any, place: str, tolerance: float) -> Iterator[str]:
    if type(got) is not type(want):
        yield f"{place}: got {_short(got)}, expected {_short(want)}"
    elif isinstance(want, Mapping):
        if got.keys() != want.keys():
            yield f"{place}: got keys {sorted(map(str, got))}, expected {sorted(map(str, want))}"
        for key in want.keys() & got.keys():
            yield from _lines(got[key], want[key], f"{place}[{key!r}]", tolerance)
    elif isinstance(want, list | tuple):
        for index, (one, other) in enumerate(zip(got, want, strict=False)):
            yield from _lines(one, other, f"{place}[{index}]", tolerance)
        if len(got) != len(want):
            rest = (got if len(got) > len(want) else want)[min(len(got), len(want))]
            yield f"{place}: got {len(got)} entries, expected {len(want)}; first other: {rest!r}"
    elif isinstance(want, Tensor | np.ndarray):
        if got.dtype != want.dtype or got.shape != want.shape:
            yield f"{place}: got {_short(got)}, expected {_short(want)}"
        elif not _equal(got, want, tolerance):
            yield f"{place}: got {got!r}, expected {want!r}"
    elif isinstance(want, float):
        if not (_close(got, want, tolerance) or (math.isnan(got) and math.isnan(want))):
            yield f"{place}: got {got!r}, expected {want!r}"
    elif got != want:
        yield f"{place}: got {got!r}, expected {want!r}"


def _close(got: float, want: float, tolerance: float) -> bool:
    return got == want or abs(got - want) <= tolerance * max(1.0, abs(want))


def _equal(got: Any, want: Any, tolerance: float) -> bool:
    if isinstance(want, np.ndarray):
        if want.dtype.kind not in "fc":
            return bool(np.array_equal(got, want))
        got, want = torch.as_tensor(got), torch.as_tensor(want)
    got, want = got.cpu(), want.cpu()  # one GPU writes its tensors where it has them
    if not want.is_floating_point():
        return torch.equal(got, want)
    scale = max(1.0, float(want.abs().nan_to_num(0).max())) if want.numel() else 1.0
    return torch.allclose(got, want, rtol=0, atol=tolerance * scale, equal_nan=True)


def _short(value: Any) -> str:
    if isinstance(value, Tensor | np.ndarray):
        return f"a {type(value).__name__} of {value.dtype} {tuple(value.shape)}"
    return f"{type(value).__name__} {value!r}"
