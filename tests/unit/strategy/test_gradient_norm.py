"""The norm of the gradients of this rank, which is alone here."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lightning_gpp.strategy.state import precision
from lightning_gpp.strategy.state.precision import _norms, _squares

SPARSE = torch.sparse_coo_tensor(
    torch.tensor([[1, 1]]), torch.tensor([3.0, 4.0]), (5,), check_invariants=True
)


def alone(number: Tensor) -> Tensor:
    return number


@pytest.mark.parametrize(
    ("gradients", "norm"),
    [
        ([], 0.0),
        ([torch.tensor([3.0]), torch.tensor([[4.0]], dtype=torch.float64)], 5.0),
        ([torch.full((400,), 6e4, dtype=torch.float16)], 1.2e6),  # no float16 is so large
        ([torch.full((1 << 16,), 1.0, dtype=torch.bfloat16)], 256.0),
        ([torch.tensor([3 + 4j]), torch.zeros(2)], 5.0),
        ([SPARSE], 7.0),
    ],
)
def test_norms_of_all_kinds_of_gradients(gradients: Sequence[Tensor], norm: float) -> None:
    found = _squares(alone, [_norms(list(gradients))]).sqrt()
    assert (found.dtype, found.device.type) == (torch.float64, "cpu")
    assert found.item() == pytest.approx(norm, rel=1e-9)


def test_a_device_without_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing on it is of float64; its half precision does not overflow all the same."""
    seen: list[torch.dtype] = []
    norms = precision.foreach_norm

    def noting(tensors: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        seen.append(dtype)
        return norms(tensors, dtype)

    monkeypatch.setattr(precision, "widest_float", lambda device: torch.float32)
    monkeypatch.setattr(precision, "foreach_norm", noting)
    norms_of = _norms([torch.full((400,), 6e4, dtype=torch.float16)])
    found = _squares(alone, [norms_of]).sqrt()
    assert found.item() == pytest.approx(1.2e6, rel=1e-6)
    assert seen == [torch.float32]
