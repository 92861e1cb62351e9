"""How values go with the samples: followed from what they are made of, not from shapes alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_gpp.capture import capture
from lightning_gpp.graph import Variation


class Mixed(nn.Module):
    """Makes values of every kind; all of them enter the result, so none is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.layer = nn.Linear(4, 4)
        self.register_buffer("places", torch.arange(8))

    def forward(self, x: Tensor) -> Tensor:
        count, length = x.shape[0], x.shape[1]
        hidden = self.layer(x)
        positions = self.table(self.places[:length])
        mean = hidden.mean()
        numbers = torch.arange(count)
        filled = torch.zeros(count, length, 4)
        picked = hidden[numbers]
        return picked * mean + positions + filled.reshape(count, length, 4)


@pytest.fixture(scope="module")
def variations() -> dict[str, tuple[str, bool]]:
    graph = capture(Mixed(), (torch.randn(4, 3, 4),), {}).graph
    return {
        name: (value.variation.value, value.is_cuttable) for name, value in graph.values.items()
    }


@pytest.mark.parametrize(
    ("name", "variation", "is_cuttable"),
    [
        ("x", "samples", True),
        ("layer", "samples", True),
        ("x_shape_0", "count", True),
        ("x_shape_1", "same", True),
        ("table", "same", True),
        ("mean", "samples", False),  # of all samples of a micro-batch
        ("arange", "whole", False),  # grows with the samples, but its second half is not theirs
        ("zeros", "samples", True),
    ],
)
def test_variation(variations, name, variation, is_cuttable):
    assert variations[name] == (variation, is_cuttable), variations


class InPlace(nn.Module):
    """A buffer's copy that is filled with what depends on the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        fixed = torch.zeros(4)
        fixed.add_(self.layer(x).mean(0))
        return self.layer(x) + fixed


def test_what_is_changed_in_place_depends_on_the_change():
    graph = capture(InPlace(), (torch.randn(4, 4),), {}).graph
    made = [value for name, value in graph.values.items() if name.startswith(("zeros", "add"))]
    assert made
    for value in made:
        assert value.variation is not Variation.SAME, value


class Columns(nn.Module):
    """Takes the samples as columns, so that no second number of samples can be tried."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(0, 1))


def test_samples_in_another_dimension_are_not_taken_for_none():
    graph = capture(Columns(), (torch.randn(5, 4),), {}).graph
    assert {value.variation for value in graph.values.values()} == {Variation.WHOLE}
    assert not any(value.is_cuttable for value in graph.values.values())
