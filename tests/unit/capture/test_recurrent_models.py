"""Recurrent layers whose states are tuples."""

from __future__ import annotations

import pytest
import torch
from pipelined import assert_partitions_exact, data
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("error")


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTM(3, 4), nn.LSTM(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, state = self.first(x)
        h, (last, _) = self.second(h, state)
        return self.head(h), last


def test_lstm_with_a_tuple_as_state() -> None:
    captured = assert_partitions_exact(Lstm(), data(5, 4, 3))
    assert [operator.name for operator in captured.graph] == ["first", "second", "head"]


class PaddedSequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
        h, _ = self.lstm(packed)
        return nn.utils.rnn.pad_packed_sequence(h, batch_first=True)[0].sum(1)


def test_packed_sequences() -> None:
    assert_partitions_exact(PaddedSequences(), data(4, 5, 3), torch.tensor([5, 3, 2, 1]))
