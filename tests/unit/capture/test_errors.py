"""What cannot be captured says where and what to do; what was frozen is checked at run time."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_gpp.capture import Block, BlockGraph, CapturedModel, CaptureError, capture


def line_of(function: Any, text: str) -> str:
    """``file:line`` of the line of a function that contains ``text``."""
    lines, start = inspect.getsourcelines(function)
    offset = next(i for i, line in enumerate(lines) if text in line)
    return f"{inspect.getsourcefile(function)}:{start + offset}"


def run(captured: CapturedModel, *tensors: Tensor) -> Any:
    names = [item.value.name for item in captured.graph.inputs]
    operators = [operator.name for operator in captured.graph]
    stage = captured.stage(operators, names, captured.graph.outputs)
    values = stage(tensors, training=captured.module.training)
    return captured.output(dict(zip(captured.graph.outputs, values, strict=True)))


class ReadsNumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.abs().sum().item() > 1e9:  # reads
            h = h * 2
        return h


def test_a_number_read_out_of_data_is_refused_with_its_line() -> None:
    with pytest.raises(CaptureError) as caught:
        capture(ReadsNumber(), (torch.randn(4, 3),), {})
    message = str(caught.value)
    assert f"{line_of(ReadsNumber.forward, '# reads')} decides by what is in the data" in message
    # The captured module itself cannot be a leaf; a sub-module that decides stays whole by itself.
    assert "use torch.where, or move this line into a sub-module" in message
    assert "leaf_modules=[...]" in message
    assert "blocks=BlockGraph(...)" in message


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = ReadsNumber(), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


@pytest.mark.parametrize("leaf", [ReadsNumber, "inner"])
def test_the_remedy_works(leaf: type | str) -> None:
    captured = capture(Outer(), (torch.randn(4, 3),), {}, leaf_modules=[leaf])
    assert [operator.name for operator in captured.graph] == ["inner", "head"]
    assert captured.graph.operators[0].parameters == ("inner.a.weight", "inner.a.bias")


class DecidesOnData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0] > 0:  # decides
            return self.a(x)
        return -self.a(x)


def test_a_decision_on_data_is_refused_before_it_comes_out_differently() -> None:
    line = line_of(DecidesOnData.forward, "# decides")
    with pytest.raises(CaptureError, match=f"{line} decides by what is in the data"):
        capture(DecidesOnData(), (torch.ones(4, 3),), {})


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


class CountsRows(DecidesOnData):
    def forward(self, x: Tensor) -> Tensor:
        chosen = x[x[:, 0] > 0]
        return self.a(x) if len(chosen) else -self.a(x)


@pytest.mark.parametrize("kind", [DecidesOnData, CountsRows])
def test_what_decides_on_data_stays_whole(kind: type[nn.Module]) -> None:
    """Though the first inputs, and those that it is tried on, go one way only."""
    captured = capture(Around(kind()), (torch.ones(4, 3),), {})
    assert [operator.name for operator in captured.graph] == ["inner", "head"]
    assert captured.decision is not None
    assert f"{kind.__name__} stays whole" in captured.decision
    for x in (torch.ones(4, 3), -torch.ones(4, 3)):
        assert torch.equal(run(captured, x), captured.module(x))


def test_a_decision_that_changes_with_the_second_input_is_refused() -> None:
    x = torch.ones(4, 3)
    x[3] = -1  # comes first in the permuted input; and the module refuses other sizes

    class Picky(DecidesOnData):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.view(4, 3))

    with pytest.raises(CaptureError, match=line_of(DecidesOnData.forward, "# decides")):
        capture(Picky(), (x,), {})


class DecidesOnSize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        for step in range(x.shape[1]):  # steps
            h = h + x[:, step : step + 1]
        return h.mean(0) if x.shape[0] > 2 else h.sum(0)  # size


class OneSample(nn.Module):
    """Takes one sample for special."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.arange(3.0).unsqueeze(0)
        if x.shape[0] != bias.shape[0]:
            bias = bias + 1
        return self.a(x) + bias


@pytest.mark.parametrize("num_samples", [1, 4])
def test_a_decision_about_one_sample_that_matters(num_samples: int) -> None:
    """Is guarded in the captured module, and keeps a sub-module whole where it shows."""
    x = torch.randn(num_samples, 3)
    captured = capture(OneSample(), (x,), {})
    with pytest.raises(CaptureError, match="depends on the size"):
        run(captured, torch.randn(5 - num_samples, 3))
    captured = capture(Around(OneSample()), (x,), {})
    if num_samples > 1:
        with pytest.raises(CaptureError, match="depends on the size"):
            run(captured, torch.randn(1, 3))
        return
    assert [operator.name for operator in captured.graph] == ["inner", "head"]
    for count in (1, 2, 4):
        x = torch.randn(count, 3)
        assert torch.allclose(run(captured, x), captured.module(x))


def test_a_decision_on_sizes_is_guarded(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(3, 4, 3)
    with caplog.at_level(logging.WARNING):
        captured = capture(DecidesOnSize(), (x,), {})
    line = line_of(DecidesOnSize.forward, "# size")
    assert "3 samples only, because its forward takes another path with 2" in caplog.text
    assert line in caplog.text
    assert torch.allclose(run(captured, torch.cat([x, x])), captured.module(torch.cat([x, x])))
    with pytest.raises(CaptureError, match=f"{line} depends on the size"):
        run(captured, x[:2])
    steps = line_of(DecidesOnSize.forward, "# steps")
    with pytest.raises(CaptureError, match=f"{steps} depends on the size .* saw 4 .* sees 2 now"):
        run(captured, x[:, :2])


class BranchesOnMode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if self.training else self.b(x).relu()  # mode


@pytest.mark.parametrize("training", [True, False])
def test_a_root_that_branches_on_the_mode_is_captured_in_its_mode(training: bool) -> None:
    inputs, module = (torch.randn(4, 3),), BranchesOnMode().train(training)
    captured = capture(module, inputs, {})
    assert [op.name for op in captured.graph] == (["a"] if training else ["b", "relu"])
    captured.inputs_of_call(inputs, {})
    again = capture(module.train(), inputs, {}, verified=captured.verified)
    assert again.fingerprint == captured.fingerprint
    line = line_of(BranchesOnMode.forward, "# mode")
    module.train(not training)
    with pytest.raises(ValueError, match=f"different operators in train and in eval.*{line}"):
        captured.inputs_of_call(inputs, {})


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ((Block("a", "nothing", ("x",)),), "'a' names an unknown module 'nothing'"),
        ((Block("h", "head", ("y",)),), "reads 'y', which is neither an argument"),
        ((Block("x", "head", ("x",)),), "'x': the name is taken"),
        ((Block("h", "head", ("x",)),), "train mode, 2 samples: output"),
    ],
)
def test_wrong_blocks(blocks: tuple[Block, ...], message: str) -> None:
    graph = BlockGraph(blocks, outputs=blocks[0].name)
    with pytest.raises(CaptureError, match=message):
        capture(Outer(), (torch.randn(4, 3),), {}, blocks=graph)


def test_another_structure_at_a_later_call() -> None:
    class Takes(nn.Module):
        def forward(self, xs: list[Tensor]) -> Tensor:
            return sum(xs[1:], xs[0]) * 2

    x = torch.randn(4, 3)
    captured = capture(Takes(), ([x, x],), {})
    text = r"'xs' of forward was list\(0: a value, 1: a value\) when the model was captured, and is"
    with pytest.raises(ValueError, match=text):
        captured.inputs(([x, x, x],), {})
    with pytest.raises(ValueError, match="was a tensor when the model was captured"):
        captured.inputs(([x, None],), {})


class Inception(nn.Module):
    """A block of branches."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([branch(x) for branch in self.branches]).sum(0)


class Auxiliary(nn.Module):
    """As GoogLeNet: another head in training, between blocks that both modes run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.aux = Inception(), Inception(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        aux = self.aux(x) if self.training else 0.0
        return self.second(x) + aux


def test_the_module_that_tells_the_modes_apart_is_named() -> None:
    """And not a block that runs in both, where the other way has gone on to."""
    captured = capture(Around(Auxiliary()), (torch.randn(4, 3),), {})
    assert [operator.name for operator in captured.graph] == ["inner", "head"]
    (line,) = captured.kept_whole
    assert line.startswith("Auxiliary stays whole: forward runs different operators")
    assert captured.decision is None


class Scheduled(nn.Module):
    """Its factors are no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(3, 3), torch.ones(3)
        self.factors, self.named = [torch.ones(3)], {"factor": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.factor * self.factors[0] * self.named["factor"]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda module: setattr(module, "factor", torch.zeros(3)), "factor"),
        (lambda module: module.factor.mul_(2), "factor"),
        (lambda module: module.factors.__setitem__(0, torch.zeros(3)), "factors"),
        (lambda module: module.named.update(factor=2.0), "named"),
    ],
)
def test_tensors_and_containers_that_forward_reads_must_not_change(change: Any, name: str) -> None:
    captured = capture(Scheduled(), (torch.ones(2, 3),))
    captured.check_reads()
    change(captured.module)
    with pytest.raises(CaptureError, match=rf"reads self\.{name}, which is not what it was"):
        captured.check_reads()


class Adapted(Scheduled):
    """Looks for two attributes, and whether one is set."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.adapter is None else self.adapter(x)
        if hasattr(self, "bonus"):
            x = x + self.bonus
        return super().forward(x)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("bonus", 1.0, "was absent when the model was captured and is 1.0 now"),
        ("bonus", nn.Identity(), "is not what it was"),
        ("adapter", nn.Identity(), "is not what it was"),
        ("adapter", torch.square, "is not what it was"),
    ],
)
def test_what_forward_looks_for_in_vain_must_not_come(name: str, value: Any, text: str) -> None:
    captured = capture(Adapted(), (torch.ones(2, 3),))
    captured.check_reads()
    setattr(captured.module, name, value)
    with pytest.raises(CaptureError, match=rf"reads self\.{name}, which {text}"):
        captured.check_reads()


def test_an_attribute_may_go_only_if_nobody_reads_it() -> None:
    captured = capture(Scheduled(), (torch.ones(2, 3),))
    del captured.module.factor
    with pytest.raises(CaptureError, match=r"reads self\.factor, which was .* and is absent now"):
        captured.check_reads()


class Seen(Metric):
    """A metric of the user's own, whose hash is made of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, count: int) -> None:
        self.count += count

    def compute(self) -> Tensor:
        return self.count


def test_the_state_of_a_metric_is_not_read_by_a_forward_that_leaves_it_alone() -> None:
    module = Scheduled()
    module.seen = Seen()
    captured = capture(module, (torch.ones(2, 3),))
    module.seen.update(2)
    captured.check_reads()


def test_lists_of_parameters_and_containers_in_themselves_are_read() -> None:
    module = Scheduled()
    module.factors, module.named["itself"] = [module.layer.bias], module.named
    captured = capture(module, (torch.ones(2, 3),))
    with torch.no_grad():
        module.layer.bias.add_(1)  # as an optimizer does
    captured.check_reads()
