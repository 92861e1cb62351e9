"""A model that one process captured and checked is captured by others without checks."""

from __future__ import annotations

import pickle

import pytest
import torch
from test_rehearsal import Counted
from torch import Tensor, nn

from lightning_gpp.capture import CaptureError, capture


class Expands(nn.Module):
    """Decides between one sample and several, which changes nothing; reads an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 3), 2.0

    def forward(self, x: Tensor) -> Tensor:
        row = self.scale * torch.ones(1, 3)
        return self.layer(x) + (row if len(x) == 1 else row.expand(len(x), 3))


class ByData(nn.Module):
    """Has to stay whole."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x - 1


class ThroughASet(nn.Module):
    """Goes through names in an order that each process has for itself, as ModernBERT does."""

    def __init__(self) -> None:
        super().__init__()
        self.order = ["local", "global", "none"]
        self.layer, self.drop, self.angles = nn.Linear(3, 3), nn.Dropout(0.5), Angles()

    def forward(self, x: Tensor) -> Tensor:
        tables = {name: self.angles(x, len(name)) for name in self.order}
        for name in self.order:
            copy = x.clone()
            tables[name] = tables[name] * copy.mul_(len(name))
        return self.layer(self.drop(x) * tables["local"] + tables["global"]) - tables["none"]


class Angles(nn.Module):
    """The same operators for another constant."""

    def forward(self, x: Tensor, period: int) -> Tensor:
        return torch.cos(torch.arange(3, dtype=x.dtype) / period)


MODELS = {
    "counted": Counted,
    "idle decision": Expands,
    "whole": lambda: nn.Sequential(nn.Linear(3, 3), ByData(), nn.Dropout(0.5)),
    "stack": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2, enable_nested_tensor=False
    ),
    "state": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_same_is_captured_without_checks(name: str) -> None:
    module = MODELS[name]()
    args = (torch.randn(4, 5, 4) if name == "stack" else torch.randn(4, 3),)
    captured = capture(module, args)
    verified = pickle.loads(pickle.dumps(captured.verified))
    again = capture(module, args, verified=verified)
    assert again.fingerprint == captured.fingerprint
    assert again.graph == captured.graph
    assert again.verified == captured.verified
    assert bool(verified.dropped) == (name == "idle decision")
    assert bool(verified.whole) == (name == "whole")
    assert verified.is_random == (name in ("whole", "stack"))


def test_it_runs_once_in_each_mode() -> None:
    module, args = Counted(), (torch.randn(4, 3),)
    verified = capture(module, args).verified
    before = next(module.runs)
    capture(module, args, verified=verified)
    assert next(module.runs) - before - 1 == 2


def test_nodes_are_in_the_order_of_the_process_that_checked() -> None:
    module, args = ThroughASet(), (torch.randn(4, 3),)
    captured = capture(module, args)
    module.order.reverse()
    assert capture(module, args).fingerprint != captured.fingerprint
    again = capture(module, args, verified=captured.verified)
    assert again.fingerprint == captured.fingerprint
    assert again.graph == captured.graph
    names = [operator.name for operator in captured.graph]
    stages = [each.stage(names, ["x"], each.graph.outputs) for each in (captured, again)]
    results = []
    for stage in stages:
        torch.manual_seed(0)
        results.append(stage([args[0]], training=True)[0])
    assert torch.equal(*results)


def test_another_model_is_refused() -> None:
    args = (torch.randn(4, 3),)
    verified = capture(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), args).verified
    with pytest.raises(CaptureError, match="another model"):
        capture(nn.Sequential(nn.Linear(3, 3)), args, verified=verified)


def test_one_sample_of_what_trains_on_several() -> None:
    """BatchNorm takes one sample in evaluation alone, where a user's first batch may have one."""
    module, args = MODELS["state"]().eval(), (torch.randn(1, 3),)
    captured = capture(module, args)
    again = capture(module, args, verified=pickle.loads(pickle.dumps(captured.verified)))
    assert again.fingerprint == captured.fingerprint
    names = [operator.name for operator in again.graph]
    stage = again.stage(
        names, [item.value.name for item in again.graph.inputs], again.graph.outputs
    )
    assert torch.equal(stage([args[0]], training=False)[0], module(*args))


def test_what_trains_on_no_number_of_samples_says_why() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match="1x3 and 4x4"):
        capture(module, (torch.randn(1, 3),))
