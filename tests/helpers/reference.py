"""Trains on one device and as a pipeline, and compares everything that must be the same."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from standin.switch import one_device
from torch import Tensor

from helpers.training import Result, Training, train
from helpers.workers import CALL_LIMIT_S, WorkerPool

RELATIVE_TOLERANCE = {"float64": 1e-9, "float32": 1e-5}
"""Largest allowed difference, relative to the largest element (or 1, if that is larger)."""


def train_one_device(training: Training) -> Result:
    """Trains in this process with a plain Trainer, on the CPU."""
    return train(training, None)


def train_one_of_their_devices(training: Training) -> Result:
    """Trains so on a device of the type that the ranks have, which rounds as they do.

    Plugins have state: they are copied, so that this run leaves none to others.
    """
    trainer = {**copy.deepcopy(dict(training.trainer)), **one_device()}
    return train_one_device(replace(training, trainer=trainer))


def train_pipeline(
    pool: WorkerPool,
    training: Training,
    *,
    num_ranks: int,
    limit_s: float = CALL_LIMIT_S,
    **strategy: Any,
) -> list[Result]:
    """Trains on ``num_ranks`` processes with ``GraphPipeStrategy(**strategy)``."""
    arguments = {"timeout": limit_s / 2} | strategy
    return pool.run(train, training, arguments, num_ranks, num_ranks=num_ranks, limit_s=limit_s)


def assert_equal_training(
    pool: WorkerPool, training: Training, *, num_ranks: int, **strategy: Any
) -> list[Result]:
    """Trains both ways and compares; returns the ranks' results."""
    expected = train_one_device(training)
    results = train_pipeline(pool, training, num_ranks=num_ranks, **strategy)
    assert_same_training(results, expected, training.data.dtype)
    assert_equal_copies(results)
    return results


def assert_equal_copies(results: Sequence[Result]) -> None:
    """What several ranks held at the end of training has the same bits on all of them."""
    first: dict[str, Tensor] = {}
    for result in results:
        for name, tensor in result.held.items():
            assert torch.equal(first.setdefault(name, tensor), tensor), name


def assert_same_training(results: Sequence[Result], expected: Result, dtype: str) -> None:
    """Compares the ranks of a pipeline with a one-device run.

    Weights and logger rows are those of rank 0; everything that callbacks read must be the same
    on every rank.

    Raises:
        AssertionError: with one line per difference.
    """
    tolerance = RELATIVE_TOLERANCE[dtype]
    assert expected.weights, "the one-device run returned no weights"
    differences = weight_differences(results[0].weights, expected.weights, tolerance)
    for rank, result in enumerate(results):
        for name in ("losses", "learning_rates", "validations", "final_metrics", "global_step"):
            differences += _metric_differences(
                f"rank {rank} {name}",
                getattr(result, name),
                getattr(expected, name),
                tolerance,
            )
    differences += _metric_differences(
        "rank 0 logged", results[0].logged, expected.logged, tolerance
    )
    assert not differences, _report(differences)


def weight_differences(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float
) -> list[str]:
    """One line for every missing, unexpected or different tensor."""
    lines = [f"weight {name} is missing" for name in sorted(set(expected) - set(actual))]
    lines += [f"weight {name} is unexpected" for name in sorted(set(actual) - set(expected))]
    for name in sorted(set(actual) & set(expected)):
        got, want = actual[name], expected[name]
        if got.shape != want.shape or got.dtype != want.dtype:
            lines.append(
                f"weight {name}: got {got.dtype} {tuple(got.shape)}, "
                f"expected {want.dtype} {tuple(want.shape)}"
            )
        elif (error := relative_error(got, want)) > tolerance or math.isnan(error):
            lines.append(f"weight {name}: relative error {error:.2e} exceeds {tolerance:.0e}")
    return lines


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest element of the expected tensor (at least 1)."""
    if expected.numel() == 0:
        return 0.0
    difference = (actual.double().to(expected.device) - expected.double()).abs().max()
    return float(difference / expected.double().abs().max().clamp(min=1.0))


def _metric_differences(where: str, actual: Any, expected: Any, tolerance: float) -> list[str]:
    """Compares nested lists and dicts of numbers."""
    if isinstance(expected, Mapping):
        if set(actual) != set(expected):
            return [f"{where}: got names {sorted(actual)}, expected {sorted(expected)}"]
        pairs = [(f"{where}[{name}]", actual[name], expected[name]) for name in expected]
    elif isinstance(expected, list):
        if len(actual) != len(expected):
            return [f"{where}: got {len(actual)} entries, expected {len(expected)}"]
        pairs = [(f"{where}[{i}]", actual[i], expected[i]) for i in range(len(expected))]
    else:
        got, want = torch.tensor([float(actual), float(expected)], dtype=torch.float64)
        if torch.equal(got.isnan(), want.isnan()) and (
            bool(want.isnan()) or relative_error(got, want) <= tolerance
        ):
            return []
        return [f"{where}: got {float(actual)!r}, expected {float(expected)!r}"]
    return [line for pair in pairs for line in _metric_differences(*pair, tolerance)]


def _report(differences: Sequence[str]) -> str:
    shown = "\n  ".join(differences[:25])
    rest = f"\n  … and {len(differences) - 25} more" if len(differences) > 25 else ""
    return f"{len(differences)} differences from one device:\n  {shown}{rest}"
