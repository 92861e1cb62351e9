from __future__ import annotations

import itertools
import logging

import torch
from torch import Tensor, nn

from lightning_gpp.capture import capture, profile_costs
from lightning_gpp.capture import profiler as probe_file
from lightning_gpp.cost import OpProfile


class Net(nn.Module):
    """A table, a matrix, and a way out."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 6)
        self.linear = nn.Linear(6, 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.linear(self.table(ids)).sum(1)


def costs_of(module: nn.Module, *args: Tensor, **options: float):
    return profile_costs(capture(module, args, {}), args, {}, **options)


def test_sizes_are_the_given_one_its_half_and_its_quarter():
    costs = costs_of(Net(), torch.zeros(8, 3, dtype=torch.long))
    assert [profile.microbatch_size for profile in costs.profiles] == [8, 4, 2]
    assert all(profile.device == "cpu" and not profile.is_estimated for profile in costs.profiles)


def test_flops_are_counted_and_grow_with_the_samples():
    costs = costs_of(Net(), torch.zeros(8, 3, dtype=torch.long))
    for size in (8, 4, 2):
        operators = costs.at(size, "cpu").operators
        assert operators["linear"].forward_flops == 2 * size * 3 * 6 * 5
        assert operators["table"].forward_flops == 0


def test_activations_grow_with_the_samples():
    costs = costs_of(Net(), torch.zeros(8, 3, dtype=torch.long))
    kept = [costs.at(size, "cpu").operators["linear"].activation_bytes for size in (8, 4, 2, 16)]
    assert kept == [size * 3 * 6 * 4 for size in (8, 4, 2, 16)]


class Forces(nn.Module):
    """Its gradient takes no hooks on what autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.energy, self.head = nn.Linear(6, 1), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.func.grad(lambda y: self.energy(y).square().sum())(x))


def test_a_gradient_inside_of_the_forward():
    costs = costs_of(nn.Sequential(Forces()), torch.randn(4, 6))
    assert all(cost.activation_bytes for cost in costs.profiles[0].operators.values())


def test_a_size_that_the_model_refuses_is_left_out():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))  # wants two samples in training
    costs = costs_of(net, torch.randn(2, 3))
    assert [profile.microbatch_size for profile in costs.profiles] == [2, 4]


def test_a_spent_budget_ends_the_measuring_and_says_so(caplog):
    with caplog.at_level(logging.WARNING):
        costs = costs_of(Net(), torch.zeros(8, 3, dtype=torch.long), budget_s=0.0)
    assert len(costs.profiles) == 1
    assert all(item.forward_s > 0 for item in costs.profiles[0].operators.values())
    assert "longer than 0 s and was cut short: 1 of 3 micro-batch sizes" in caplog.text


def test_measuring_leaves_no_gradients_behind():
    net = Net()
    costs_of(net, torch.zeros(8, 3, dtype=torch.long))
    assert all(parameter.grad is None for parameter in net.parameters())


class Layers(nn.Module):
    """Layers, some of which do the same work."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)  # no gradient goes back to its input
        self.same = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.unbiased = nn.Linear(4, 4, bias=False)
        self.steep = nn.LeakyReLU(0.5)
        self.flat = nn.LeakyReLU(0.1)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.same:
            x = torch.roll(layer(x), 1, dims=1)
        return torch.roll(self.frozen(self.flat(self.steep(self.unbiased(x)))), 2, dims=1)


def test_operators_that_do_the_same_work_cost_the_same(monkeypatch):
    numbers = itertools.count(1)
    repeated = {}

    def measure(self, values, seen, repeats, deadline_s):
        inputs = [values[name] for name in self.stage.inputs]
        repeated.setdefault(self.name, repeats)
        self.results = dict(zip(self.outputs, self.stage(inputs, training=True), strict=True))
        return OpProfile(float(next(numbers)))

    monkeypatch.setattr(probe_file.OperatorProbe, "measure", measure)
    costs = costs_of(Layers(), torch.randn(8, 4), num_sizes=1)
    found: dict[float, list[str]] = {}
    for name, cost in costs.profiles[0].operators.items():
        found.setdefault(cost.forward_s, []).append(name)
    assert [names for names in found.values() if len(names) > 1] == [
        ["same_0", "same_1", "same_2"],
        ["roll", "roll_1", "roll_2"],
    ]
    assert repeated["first"] == repeated["frozen"] == repeated["same_0"] == 3
    assert not {"same_1", "same_2", "roll_1"} & repeated.keys()


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.shape[1] * 2 > 7 and x.sum(dim=0).numel() > 3 else x


def test_decisions_do_not_tell_repeated_blocks_apart():
    """A guard knows its block, but what it costs is the same in all of them."""
    captured = capture(nn.Sequential(*(Deciding() for _ in range(3))), (torch.randn(2, 4),), {})
    blocks = ("module_0_linear", "module_1_linear")
    first, second = (
        probe_file.work_of(each, captured) for each in captured.graph if each.name in blocks
    )
    assert "guard" in str(first)
    assert first == second
