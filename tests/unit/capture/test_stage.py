"""Stages run the user's own modules, wherever those go after capture."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from pipelined import assert_partitions_exact, data
from torch import Tensor, fx, nn

from lightning_gpp.capture import capture

SCRIPT = """
import torch
from torch import nn
from lightning_gpp.capture import capture
torch.manual_seed({seed})
module = nn.Sequential(nn.Linear(3, {width}), nn.Dropout({p}), nn.Linear({width}, 2))
print(capture(module, (torch.randn(4, 3),), {{}}).fingerprint)
"""


def test_fingerprint_is_equal_across_processes_and_weights() -> None:
    namespace: dict[str, object] = {}
    results: list[str] = []

    def here(**options: object) -> str:
        exec(SCRIPT.format(**options).replace("print(", "result = ("), namespace)
        return str(namespace["result"])

    results = [here(seed=0, width=4, p=0.5), here(seed=1, width=4, p=0.5)]
    script = SCRIPT.format(seed=0, width=4, p=0.5)
    other = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=600
    )
    assert {*results, other.stdout.strip()} == {results[0]}
    assert here(seed=0, width=5, p=0.5) != results[0]


def test_constants_and_frozen_arguments_count_in_the_fingerprint() -> None:
    class Shifts(nn.Module):
        def __init__(self, shift: float) -> None:
            super().__init__()
            self.shift = torch.tensor(shift)

        def forward(self, x: Tensor, times: int) -> Tensor:
            return x * times + self.shift

    x = torch.randn(4, 3, requires_grad=True)
    prints = [
        capture(Shifts(shift), (x, times), {}).fingerprint
        for shift, times in [(1.0, 1), (2.0, 1), (1.0, 2), (1.0, 1)]
    ]
    assert len(set(prints)) == 3
    assert prints[0] == prints[3]


def test_names_that_python_keeps_for_itself() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterDict({"lambda": torch.ones(3)})
            self.layers = nn.ModuleDict({"class": nn.Linear(3, 3)})

        def forward(self, x: Tensor) -> Tensor:
            return self.layers["class"](x * self.scales["lambda"])

    assert_partitions_exact(Named(), data(4, 3))


def test_making_a_stage_does_not_walk_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage of every operator, as they are measured, took time by the square of their number."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(6)))
    captured = capture(model, (torch.randn(4, 3),))
    walks: list[fx.Graph] = []
    nodes = fx.Graph.nodes.fget
    counted = property(lambda graph: walks.append(graph) or nodes(graph))
    monkeypatch.setattr(fx.Graph, "nodes", counted)
    for operator in captured.graph:
        captured.stage([operator.name], operator.inputs, [operator.outputs[0].name])
        captured.nodes(operator.name)
    assert len(walks) <= 2  # once for each mode
