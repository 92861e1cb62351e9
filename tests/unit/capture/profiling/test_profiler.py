from __future__ import annotations

import itertools
import logging

import pytest
import torch
from torch import Tensor, nn

from lightning_gpp.capture import capture, profile_costs
from lightning_gpp.capture.profiling import operator_probe as probe_file
from lightning_gpp.capture.profiling.profiler import work_of
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


def test_one_sample_is_measured_as_two_and_four_too():
    costs = costs_of(Net(), torch.zeros(1, 3, dtype=torch.long))
    assert [profile.microbatch_size for profile in costs.profiles] == [1, 2, 4]


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


def test_a_size_that_the_model_refuses_is_left_out():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))  # wants two samples in training
    costs = costs_of(net, torch.randn(2, 3))
    assert [profile.microbatch_size for profile in costs.profiles] == [2, 4]


def test_a_model_without_samples_is_measured_at_one_size():
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    costs = costs_of(Fixed(), torch.randn(4, 3))
    assert [profile.microbatch_size for profile in costs.profiles] == [4]


def test_a_spent_budget_ends_the_measuring_and_says_so(caplog):
    with caplog.at_level(logging.WARNING):
        costs = costs_of(Net(), torch.zeros(8, 3, dtype=torch.long), budget_s=0.0)
    assert len(costs.profiles) == 1
    assert all(item.forward_s > 0 for item in costs.profiles[0].operators.values())
    assert "profiling took more than its 0 s: 1 of 3 micro-batch sizes" in caplog.text


@pytest.mark.parametrize(
    ("times_s", "settled"),
    [([1.0], True), ([1.0, 1.05, 1.1, 9.0], False), ([1.0, 9.0], False), ([1.0] * 5 + [9.0], True)],
)
def test_times_have_settled_when_their_middle_half_is_narrow(times_s, settled):
    assert probe_file._has_settled([OpProfile(time_s) for time_s in times_s]) is settled


def test_measuring_leaves_no_gradients_behind():
    net = Net()
    costs_of(net, torch.zeros(8, 3, dtype=torch.long))
    assert all(parameter.grad is None for parameter in net.parameters())


def test_every_size_is_measured_again_and_the_quicker_time_counts(monkeypatch):
    """All operators were slow at 4 samples the first time."""
    calls = []

    def measure(self, values, repeats, deadline_s):
        inputs = [values[name] for name in self.stage.inputs]
        size = len(inputs[0])
        slow = 9.0 if size == 4 and (self.name, size) not in calls else 1.0
        calls.append((self.name, size))
        self.results = dict(zip(self.outputs, self.stage(inputs, training=True), strict=True))
        return OpProfile(slow * (1 + size))

    monkeypatch.setattr(probe_file.OperatorProbe, "measure", measure)
    costs = costs_of(Net(), torch.zeros(8, 3, dtype=torch.long))
    for profile in costs.profiles:
        seconds = {cost.forward_s for cost in profile.operators.values()}
        assert seconds == {1 + profile.microbatch_size}
    assert [size for name, size in calls if name == "linear"] == [8, 4, 2, 8, 4, 2]


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

    def measure(self, values, repeats, deadline_s):
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
    assert repeated["first"] == repeated["frozen"] == 3
    assert repeated["same_1"] == repeated["roll"] == 1


class Heads(nn.Module):
    """Attention with 1, 4 and 4 heads, which its text does not say."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(8, 8)
        self.layers = nn.ModuleList(
            nn.MultiheadAttention(8, n, batch_first=True) for n in (1, 4, 4)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for layer in self.layers:
            x = layer(x, x, x, need_weights=False)[0]
        return x


def test_other_settings_are_other_work():
    args = (torch.randn(2, 3, 8),)
    captured = capture(Heads(), args, {})
    one, four, other = (
        work_of(operator, captured) for operator in captured.graph if operator.name != "start"
    )
    assert one != four == other


def test_gradients_are_added_to_those_of_the_warm_up(monkeypatch):
    """As in every micro-batch but the first."""
    net, args = nn.Sequential(nn.Linear(3, 2)), (torch.randn(4, 3),)
    captured = capture(net, args, {})
    found = []
    backward = torch.autograd.backward

    def watched(*args, **kwargs):
        backward(*args, **kwargs)
        if net[0].bias.grad is not None:
            found.append(net[0].bias.grad[0].item())

    monkeypatch.setattr(torch.autograd, "backward", watched)
    profile_costs(captured, args, num_sizes=1)
    assert found[:4] == [4.0, 8.0, 12.0, 16.0]  # of four samples each


class Deep(nn.Module):
    """Twelve layers of the same work, and a way out."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(12))
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, bool]]:
    """What probes ran: operator, samples, whether it was timed; times count upwards."""
    ran: list[tuple[str, int, bool]] = []
    look, numbers = probe_file.OperatorProbe.look, itertools.count(1)

    def looked(self, values):
        ran.append((self.name, len(values[self.stage.inputs[0]]), False))
        return look(self, values)

    def measure(self, values, repeats, deadline_s):
        inputs = [values[name] for name in self.stage.inputs]
        ran.append((self.name, len(inputs[0]), True))
        self.results = dict(zip(self.outputs, self.stage(inputs, training=True), strict=True))
        return OpProfile(float(next(numbers)))

    monkeypatch.setattr(probe_file.OperatorProbe, "look", looked)
    monkeypatch.setattr(probe_file.OperatorProbe, "measure", measure)
    return ran


def test_of_alike_operators_the_first_few_are_timed_and_the_rest_do_not_run(monkeypatch):
    ran = watched(monkeypatch)
    costs = costs_of(Deep(), torch.randn(8, 4))
    names = ["start", *(f"layers_{number}" for number in range(12)), "out"]
    first_three = {"layers_0", "layers_1", "layers_2"}
    for profile in costs.profiles:
        alike = [profile.operators[name] for name in names[1:-1]]
        assert all(cost == alike[0] for cost in alike)
    looked_at = [name for name, size, is_timed in ran if size == 8 and not is_timed]
    assert looked_at == [*names, "start", "layers_0", "out"]  # measured again: one of each
    at_other_sizes = {name for name, size, _ in ran if size != 8}
    assert at_other_sizes == {"start", "out", *first_three}
    timed = [(name, size) for name, size, is_timed in ran if is_timed and name in names[1:-1]]
    # three of the twelve at each size; then one more time, one of them
    assert timed == [
        *((name, size) for size in (8, 4, 2) for name in sorted(first_three)),
        *(("layers_0", size) for size in (8, 4, 2)),
    ]


class Route(nn.Module):
    """Rows of a table, found by numbers that are in no text: its length is a buffer.

    Args:
        num_rows: of the table.
    """

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.register_buffer("num_rows", torch.tensor(num_rows))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.tanh(), self.num_rows - 1 - (x.argmax(-1) % self.num_rows)


class Routed(nn.Module):
    """Routes that do the same work, into tables of fewer and fewer rows."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(4, 4)
        self.routes = nn.ModuleList(Route(num_rows) for num_rows in (90, 70, 50, 9, 5, 2))
        self.tables = nn.ModuleList(nn.Embedding(n, 4) for n in (90, 70, 50, 9, 5, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for route, table in zip(self.routes, self.tables, strict=True):
            x, rows = route(x)
            x = x + table(rows)
        return x


def test_numbers_are_not_taken_from_an_operator_that_does_the_same_work(monkeypatch):
    """Those of a longer table do not fit into a shorter one."""
    ran = watched(monkeypatch)
    module, args = Routed(), (torch.randn(8, 4),)
    captured = capture(module, args, leaf_modules=[Route])
    routes = [f"routes_{number}" for number in range(6)]
    works = {work_of(captured.graph.operator[name], captured) for name in routes}
    assert len(works) == 1
    costs = profile_costs(captured, args)
    assert [profile.microbatch_size for profile in costs.profiles] == [8, 4, 2]
    for size in (8, 4, 2):
        assert {name for name, at, _ in ran if at == size and name in routes} == set(routes)
        assert len({costs.at(size, "cpu").operators[name].forward_s for name in routes}) == 1


class Sines(nn.Module):
    """As many sines as an attribute says that is no plain setting.

    Args:
        count: of the sines.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = {count}

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(max(self.count)):
            x = x.sin()
        return x


def test_operators_that_keep_other_numbers_of_bytes_are_measured_apart(monkeypatch):
    watched(monkeypatch)
    module = nn.Sequential(nn.Linear(4, 4), Sines(1), Sines(5), Sines(1), Sines(5))
    args = (torch.randn(8, 4),)
    captured = capture(module, args, leaf_modules=[Sines])
    names = [operator.name for operator in captured.graph][1:]
    assert len({work_of(captured.graph.operator[name], captured) for name in names}) == 1
    for profile in profile_costs(captured, args).profiles:
        one, five, other_one, other_five = (profile.operators[name] for name in names)
        assert one == other_one and five == other_five
        assert one.forward_s != five.forward_s
        kept = profile.microbatch_size * 4 * 4  # bytes of an input of a sine
        assert (one.activation_bytes, five.activation_bytes) == (kept, 5 * kept)
