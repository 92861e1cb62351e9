"""Gradients of whole parameters are summed in buckets, and parameters see them once."""

from __future__ import annotations

import pytest
import torch
from helpers.spmd_ranks import on_threads

from lightning_gpp.spmd.run.gradient_sums import GradientSums, give_gradients

SIZES = (3, 50, 1, 7, 9)


def parameters() -> list[torch.Tensor]:
    torch.manual_seed(0)
    dtypes = (torch.float64, torch.float64, torch.float32, torch.float64, torch.float64)
    return [torch.randn(n, dtype=d).requires_grad_() for n, d in zip(SIZES, dtypes)]


@pytest.mark.parametrize(
    ("bucket_bytes", "num_messages"), [(1, 5), (100, 4), (10**9, 3)], ids=["each", "some", "all"]
)
def test_buckets(bucket_bytes: int, num_messages: int) -> None:
    """One dtype in a bucket; gradients come last first: 72, 56, 4 (floats), 400, 24 bytes."""

    first = parameters()

    def run(group):
        group.count = 0
        begin = group.begin_all_reduce

        def counted(tensor, *, purpose):
            group.count += 1
            return begin(tensor, purpose=purpose)

        group.begin_all_reduce = counted
        sums = GradientSums(group, bucket_bytes)
        seen, given = [], [p.detach().clone().requires_grad_() for p in first]
        for parameter in given:
            parameter.register_hook(seen.append)
        for _ in range(2):
            for parameter in reversed(given):
                sums.add(parameter, (group.rank + 1) * parameter.detach())
            sums.finish()
        assert len(seen) == 2 * len(given)  # a hook sees every sum, once
        return [p.grad for p in given], group.count

    for gradients, count in on_threads(2, run):
        assert count == 2 * num_messages
        for parameter, gradient in zip(first, gradients, strict=True):
            torch.testing.assert_close(gradient, 2 * (1 + 2) * parameter.detach())


def test_gradients_are_given_as_they_are() -> None:
    """No copy of them; hooks see them, and a second gradient is added to the first."""
    given = parameters()[:2]
    seen: list[int] = []
    given[0].register_hook(lambda gradient: seen.append(gradient.numel()))
    gradients = [torch.ones_like(parameter) for parameter in given]
    memory = [gradient.data_ptr() for gradient in gradients]
    give_gradients(given, (gradients.pop(0) for _ in given))
    assert [parameter.grad.data_ptr() for parameter in given] == memory
    give_gradients(given, (torch.ones_like(parameter) for parameter in given))
    assert seen == 2 * [given[0].numel()]
    for parameter in given:
        torch.testing.assert_close(parameter.grad, 2 * torch.ones_like(parameter))
