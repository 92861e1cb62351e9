"""Properties over random models and random partitions, and the grouping of nodes."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pipelined import assert_partitions_exact, random_stages, run_module, run_stages
from torch import Tensor, nn

from lightning_gpp.capture import capture
from lightning_gpp.capture.checks.check import compare
from lightning_gpp.graph import stage_graph

WIDTH = 3


@dataclass(frozen=True)
class Step:
    """One line of a random forward: what to do with which earlier values."""

    kind: str
    left: int
    right: int


steps = st.builds(
    Step,
    kind=st.sampled_from(
        ["linear", "shared", "add", "cat", "relu_", "relu", "size", "split", "item", "parameter"]
    ),
    left=st.integers(0, 9),
    right=st.integers(0, 9),
)


class RandomModel(nn.Module):
    """A forward made of random steps on earlier values, in-place changes included."""

    def __init__(self, program: list[Step]) -> None:
        super().__init__()
        self.program = program
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in program)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.mix = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        values = [x, y]
        for number, step in enumerate(self.program):
            left, right = values[step.left % len(values)], values[step.right % len(values)]
            values.append(self.step(number, step.kind, left, right))
        return {"last": values[-1], "sum": sum(values[2:], x)}

    def step(self, number: int, kind: str, left: Tensor, right: Tensor) -> Tensor:
        if kind == "linear":
            return self.linears[number](left)
        if kind == "shared":
            return self.shared(left)
        if kind == "add":
            return left + right
        if kind == "cat":
            return self.mix(torch.cat([left, right], dim=1))
        if kind == "relu_":
            fresh = left + 0.1  # what addition keeps for its backward may be changed
            view = fresh[:, 1:]
            other = fresh * 1
            view.relu_()
            return fresh + other
        if kind == "size":
            return left.view(right.shape[0], -1) * left.size(1)
        if kind == "split":
            first, rest = left.split([1, left.shape[1] - 1], dim=1)
            return torch.cat([rest, first], dim=1)
        if kind == "item":
            return left + right[:, 0:1]
        if kind == "parameter":
            return left * self.scale
        return left.relu()


@given(
    program=st.lists(steps, min_size=1, max_size=8),
    seed=st.integers(0, 1000),
    training=st.booleans(),
)
def test_any_partition_of_a_random_model_is_exact(
    program: list[Step], seed: int, training: bool
) -> None:
    torch.manual_seed(seed)
    module = RandomModel(program).double().train(training)
    args = (
        torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True),
        torch.randn(4, WIDTH, dtype=torch.float64),
    )
    captured = capture(module, args, {})
    rng = random.Random(seed)
    for _ in range(3):
        stages = random_stages(captured.graph, rng)
        stage_graph(captured.graph, stages)  # raises if an edge runs backwards
        expected = run_module(module, args, {})
        got = run_stages(captured, stages, args, {})
        parameters = {name: got.gradients.get(name) for name in expected.gradients}
        for name, gradient in expected.gradients.items():
            other = parameters[name]
            expected_zero = torch.zeros(()) if gradient is None else gradient
            got_zero = torch.zeros(()) if other is None else other
            torch.testing.assert_close(
                *torch.broadcast_tensors(expected_zero.double(), got_zero.double())
            )
        compare(type(expected)(expected.output, {}), type(got)(got.output, {}), f"stages {stages}")


class SizesFarAway(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        batch = x.size(0)
        h = self.b(self.a(x))
        return self.c(h.view(batch, -1)).view(x.size(0), 2, -1)


def test_the_size_of_an_input_is_taken_where_the_input_is_read() -> None:
    captured = assert_partitions_exact(SizesFarAway(), torch.randn(4, 4))
    operators = captured.graph.operator
    assert {value.name for value in operators["a"].outputs} == {"a", "size"}
    assert operators["view"].inputs == ("b", "size")
    assert operators["view_1"].inputs == ("c", "size")  # asked for twice, computed once


class TwoTowersOfSizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        assert x.shape[0] == y.shape[0]
        return self.a(x) + self.b(y).view(y.shape[0], -1)


def test_a_guard_does_not_tie_towers_together() -> None:
    captured = assert_partitions_exact(TwoTowersOfSizes(), torch.randn(4, 4), torch.randn(4, 4))
    predecessors = captured.graph.predecessors
    assert predecessors["a"] == ()
    assert predecessors["b"] == ()


class InPlaceBetween(nn.Module):
    """c reads h before the change and feeds the change: all of it is one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c, self.d = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.add_(self.c(x.detach() * 2).sigmoid() * h.detach().mean())
        return self.d(h)


def test_operators_between_an_in_place_change_and_its_memory_join() -> None:
    captured = assert_partitions_exact(InPlaceBetween(), torch.randn(4, 3))
    joined = captured.graph.operators[-2]
    assert {"a.weight"} <= set(joined.parameters)
    assert captured.graph.operators[-1].name == "d"
    assert "c" in captured.graph.operator  # it only feeds the change, so it stays by itself


@pytest.mark.parametrize("num_samples", [1, 2, 5])
def test_batch_dim_for_any_number_of_samples(num_samples: int) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Unflatten(1, (2, 2)), nn.Flatten(0, 1))
    captured = capture(module, (torch.randn(num_samples, 3),), {})
    dims = [o.outputs[0].tensors[0].batch_dim for o in captured.graph]
    assert dims == [0, 0, 0]


def test_what_does_not_grow_with_the_batch_has_no_batch_dim() -> None:
    class Mean(nn.Module):
        def forward(self, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x.mean(0), x.t().contiguous(), table * 2

    captured = capture(Mean(), (torch.randn(4, 3), torch.randn(7, 2)), {})
    specs = {value.name: value.tensors[0] for o in captured.graph for value in o.outputs}
    assert [specs[name].batch_dim for name in captured.graph.outputs] == [None, 1, None]
    assert [item.value.tensors[0].batch_dim for item in captured.graph.inputs] == [0, None]
