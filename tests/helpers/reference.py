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

from helpers.alike import differences
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
    found = weight_differences(results[0].weights, expected.weights, tolerance)
    for rank, result in enumerate(results):
        for name in ("losses", "learning_rates", "validations", "final_metrics", "global_step"):
            got, want = getattr(result, name), getattr(expected, name)
            found += differences(got, want, f"rank {rank} {name}", tolerance)
    found += differences(results[0].logged, expected.logged, "rank 0 logged", tolerance)
    assert not found, _report(found)


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


def _report(found: Sequence[str]) -> str:
    shown = "\n  ".join(found[:25])
    rest = f"\n  … and {len(found) - 25} more" if len(found) > 25 else ""
    return f"{len(found)} differences from one device:\n  {shown}{rest}"
