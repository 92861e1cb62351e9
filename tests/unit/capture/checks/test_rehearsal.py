"""What a graph is compared on, and what a module shows that does not compute the same twice."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from lightning_gpp.capture import CaptureError, capture
from lightning_gpp.capture.checks.rehearsal import Rehearsal
from lightning_gpp.capture.tracing.modes import mode_flags
from lightning_gpp.capture.values.arguments import Arguments
from lightning_gpp.capture.values.host_weights import HostWeights
from lightning_gpp.capture.values.samples import first_sample


class Counted(nn.Module):
    """A layer that counts its runs where no rollback sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.runs = nn.Linear(3, 2), itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        next(self.runs)
        return self.layer(x)


def rehearsal_of(module: nn.Module, num_samples: int) -> Rehearsal:
    args = (torch.randn(num_samples, 3),)
    arguments = Arguments.of(module, args, {})
    sample = first_sample(arguments.tensors(args, {}))
    weights = HostWeights(module, sample.device)
    return Rehearsal(module, arguments, sample, mode_flags(module, None), weights)


@pytest.mark.parametrize(
    ("num_samples", "expected"),
    [
        (
            4,  # two are fewer
            [
                "train mode, 4 samples",
                "train mode, 2 samples, backward",
                "eval mode, 2 samples, backward",
                "eval mode, 4 samples, without gradients",
            ],
        ),
        (
            1,  # two are more
            [
                "train mode, 1 samples, backward",
                "train mode, 2 samples",
                "eval mode, 1 samples, backward",
                "eval mode, 2 samples",
                "eval mode, 1 samples, without gradients",
            ],
        ),
    ],
)
def test_values_are_compared_on_all_sizes_and_gradients_on_the_smallest(
    num_samples: int, expected: list[str]
) -> None:
    module = Counted()
    rehearsal = rehearsal_of(module, num_samples)
    rehearsal.begin()
    passes = list(rehearsal.passes(rehearsal.others[0], gradients=True))
    assert [f"{run}{', backward' * run.backward}" for run in passes] == expected
    for run in passes:
        assert bool(rehearsal.of(run).gradients) == run.backward
    assert next(module.runs) == len(passes)  # each ran once


class Alternating(nn.Module):
    """Its output has one row more in every second call; no rollback sees the counter.

    Args:
        phase: of the first call.
        factor: by which the values of every second call differ; the rows stay, if not 1.
    """

    def __init__(self, phase: int, factor: float = 1.0) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(3, 2), factor
        self.turns = itertools.cycle([phase, 1 - phase])

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if not next(self.turns):
            return y
        return torch.cat([y, y[:1]]) if self.factor == 1 else self.factor * y


@pytest.mark.parametrize("phase", [0, 1])
@pytest.mark.parametrize("factor", [1.0, 2.0], ids=["shapes", "values"])
@pytest.mark.parametrize("num_samples", [1, 2, 4])
@pytest.mark.parametrize("is_inner", [False, True])
def test_what_alternates_from_call_to_call_is_refused(
    phase: int, factor: float, num_samples: int, is_inner: bool
) -> None:
    module: nn.Module = Alternating(phase, factor)
    if is_inner:
        module = nn.Sequential(module, nn.Linear(2, 2))
    with pytest.raises(CaptureError, match="cannot be captured"):
        capture(module, (torch.randn(num_samples, 3),))
