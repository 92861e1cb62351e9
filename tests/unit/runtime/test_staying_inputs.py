"""Inputs that stay are sent once, and whatever changes in them is sent again."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_gpp.runtime.payload import Payload, pack, unpack
from lightning_gpp.runtime.staying_inputs import StayingInputs

NAMES = ("edge_index", "x")


@dataclass
class Pair:
    """A sender and the receiver of its messages to stage 3 on rank 1."""

    names: frozenset[str] = frozenset(NAMES)
    sender: StayingInputs = field(init=False)
    receiver: StayingInputs = field(init=False)

    def __post_init__(self) -> None:
        self.sender, self.receiver = StayingInputs(self.names), StayingInputs(self.names)

    def hand_over(self, values: list[object], names: tuple[str, ...] = NAMES) -> Payload:
        """The message of a run; what arrives is checked to be what was given, bit by bit."""
        self.sender.begin()
        message = self.sender.thinned(pack(values), names, 1, 3)
        got = unpack(self.receiver.filled(message, names, 3))
        for value, expected in zip(got, values, strict=True):
            if isinstance(expected, Tensor):
                assert_same_bits(value, expected)
        return message


def assert_same_bits(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    assert got.detach().numpy().tobytes() == expected.detach().numpy().tobytes()


def sent(message: Payload) -> list[bool]:
    return [tensor is not None for tensor in message.tensors]


def test_the_same_is_sent_once():
    pair, edges, x = Pair(), torch.tensor([[0, 1], [1, 2]]), torch.randn(3, 4)
    assert sent(pair.hand_over([edges, x])) == [True, True]
    assert sent(pair.hand_over([edges, x])) == [False, False]
    assert sent(pair.hand_over([edges.clone(), x + 1])) == [False, True]
    assert sent(pair.hand_over([edges[:, :1], x + 1])) == [True, False]
    assert pair.hand_over([edges[:, :1], x + 1]).num_bytes == 0


def test_a_column_of_one_sample():
    """Contiguous, and of another stride than 1."""
    column = torch.arange(6).reshape(2, 3)[:1, 1]
    pair = Pair(frozenset(("x",)))
    assert sent(pair.hand_over([column], ("x",))) == [True]
    assert sent(pair.hand_over([column.clone()], ("x",))) == [False]


@pytest.mark.parametrize("change", [torch.nan, -0.0, 2.0])
def test_a_change_in_place_is_seen(change: float):
    """Also one that neither version counters nor comparisons of numbers show."""
    array = np.zeros(4, dtype=np.float32)
    pair = Pair()
    pair.hand_over([torch.zeros(2, 2, dtype=torch.int64), torch.from_numpy(array)])
    array[1] = change
    message = pair.hand_over([torch.zeros(2, 2, dtype=torch.int64), torch.from_numpy(array)])
    assert sent(message) == [False, True]
    again = pair.hand_over([torch.zeros(2, 2, dtype=torch.int64), torch.from_numpy(array)])
    assert sent(again) == [False, False]


def test_what_the_receiver_makes_of_it_does_not_reach_the_sender():
    pair, x = Pair(), torch.zeros(3)
    message = pair.sender.thinned(pack([x]), ("x",), 1, 3)
    (got,) = unpack(pair.receiver.filled(message, ("x",), 3))
    x += 1  # the memory of the message is the sender's again
    assert pair.receiver.kept[3, "x"].tolist() == [0, 0, 0]
    assert got.tolist() == [0, 0, 0]


def test_what_was_kept_in_inference_mode_can_be_trained_with():
    pair = Pair()
    with torch.inference_mode():
        pair.hand_over([torch.zeros(2, 2), torch.ones(2)])
    message = pair.sender.thinned(pack([torch.ones(2)]), ("x",), 1, 3)
    (x,) = unpack(pair.receiver.filled(message, ("x",), 3))
    assert message.tensors == [None]
    weight = torch.ones(2, requires_grad=True)
    (x * weight).sum().backward()
    assert weight.grad is not None


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),  # of three runs of messages
            st.sampled_from([(1, 0), (1, 1), (2, 0)]),
            st.tuples(st.integers(0, 2), st.integers(0, 2)),
        ),
        max_size=30,
    )
)
def test_any_messages_arrive_as_they_were(messages):
    sender = StayingInputs(frozenset(NAMES))
    receivers = {rank: StayingInputs(frozenset(NAMES)) for rank in (1, 2)}
    for number, (rank, stage), contents in sorted(messages, key=lambda message: message[0]):
        if number:
            sender.begin()
        tensors = [torch.full((2,), float(content)) for content in contents]
        message = sender.thinned(pack(tensors), NAMES, rank, stage)
        got = receivers[rank].filled(message, NAMES, stage)
        for value, expected in zip(got.tensors, tensors, strict=True):
            assert value is not None
            assert_same_bits(value, expected)
