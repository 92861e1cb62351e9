"""What tracing freezes is computed anew, kept inside of a leaf, or reported with its line.

Each row is a module with one trap and what becomes of it:

- ``follows``: the captured graph computes what the module computes at every other size;
- ``guarded``: it computes the same or raises an error that names the line, at some sizes;
- ``refused``: capture raises an error that names the line.
"""

from __future__ import annotations

import functools
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pipelined import assert_partitions_exact, run_whole
from torch import Tensor, nn

from lightning_gpp.capture import CapturedModel, CaptureError, capture
from lightning_gpp.capture.errors import GuardError

pytestmark = pytest.mark.filterwarnings("error")


class Trap(nn.Module):
    """Two layers and the function of a row."""

    def __init__(self, function: Callable[[Trap, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 6)
        self.function, self.p = function, 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


@dataclass(frozen=True)
class Row:
    """A trap.

    Attributes:
        function: of the module and ``x (samples, 4)``.
        says: part of the error, where there is one.
    """

    function: Callable[[Trap, Tensor], Tensor]
    says: str = ""


def _in_turns(m: Trap, x: Tensor) -> Tensor:
    return torch.stack([m.a(sample) for sample in x])


def _mask(x: Tensor) -> Tensor:
    return torch.triu(torch.full((len(x), len(x)), -1e9), 1).softmax(-1)


def _filled(m: Trap, x: Tensor) -> Tensor:
    out = torch.zeros(x.size(0), 6)
    out[:, :3] = m.a(x)[:, :3]
    out[:, 3:] = m.b(m.a(x))[:, 3:]
    return out


def _generator(m: Trap, x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return m.a(x) + torch.randn(len(x), 6, generator=generator)


def _numpy_rows(m: Trap, x: Tensor) -> Tensor:
    """Draws, and then does with a size what numpy does with plain numbers only."""
    scale = np.random.rand()
    return m.a(x) * torch.as_tensor(np.split(np.full(4, scale), [x.shape[0] // 2])[0].max())


def _seeds(m: Trap, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return m.a(x) + torch.randn(len(x), 6)


FOLLOWS = {
    "divided by the size": lambda m, x: m.a(x) / x.shape[0],
    "divided by len": lambda m, x: m.a(x).sum(0) / len(x) + m.a(x),
    "arange": lambda m, x: m.a(x) + torch.arange(x.size(0))[:, None],
    "square root of the size": lambda m, x: m.a(x) / math.sqrt(x.shape[0]),
    "logarithm of the size": lambda m, x: m.a(x) * math.log(len(x) + 1),
    "numpy root of the size": lambda m, x: m.a(x) / np.sqrt(x.shape[0]),
    "power of the size": lambda m, x: m.a(x) * x.shape[0] ** -0.5,
    "sum of the shape": lambda m, x: m.a(x) * sum(x.shape) + x.numel(),
    "product of the shape": lambda m, x: m.a(x) * math.prod(x.shape),
    "divmod of the size": lambda m, x: m.a(x) * divmod(x.shape[0], 2)[0] + (x.shape[0] >> 1),
    "divmod by the size": lambda m, x: m.a(x) * divmod(7, x.shape[0])[0],
    "stride": lambda m, x: m.a(x) * x.t().stride()[1],
    "tensor of the size": lambda m, x: m.a(x) * torch.tensor([x.shape[0], 2.0])[0],
    "zeros": lambda m, x: m.a(x) + torch.zeros(x.shape[0], 6) + torch.ones(x.size())[:, :1],
    "filled zeros": _filled,
    "mask of the size": lambda m, x: _mask(x) @ m.a(x),
    "linspace": lambda m, x: m.a(x) * torch.linspace(0, 1, x.shape[0])[:, None],
    "view": lambda m, x: m.a(x).view(-1, 2, 3).permute(0, 2, 1).reshape(x.shape[0], -1),
    "expand": lambda m, x: m.a(x).expand(2, *x.shape[:-1], 6).sum(0),
    "number in the graph": lambda m, x: m.a(x) * (x.sum() * 2).item(),
    "rows by a condition": lambda m, x: m.a(x)[m.a(x)[:, 0] > 0],
    "nonzero": lambda m, x: m.a(x).index_add(0, (x[:, 0] > 0).nonzero()[:, 0], m.a(x)[x[:, 0] > 0]),
    "partial": lambda m, x: functools.partial(torch.mul, x.shape[0])(m.a(x)),
    "module made on the spot": lambda m, x: nn.ReLU()(m.a(x)),
    "dropout with an attribute": lambda m, x: F.dropout(m.a(x), m.p, m.training) + m.b(m.a(x)),
    "dropout always": lambda m, x: F.dropout(m.a(x), p=m.p),
    "noise of the size": lambda m, x: m.a(x) + torch.randn(x.shape[0], 6),
    "permutation": lambda m, x: m.a(x)[torch.randperm(x.shape[0])],
    "asserts": lambda m, x: m.a(x) if x.ndim == 2 and x.shape[1] == 4 else x / 0,
}

GUARDED = {
    "int of the size": Row(lambda m, x: m.a(x) * int(x.shape[0])),
    "float of the size": Row(lambda m, x: m.a(x) * float(x.shape[0])),
    "range over samples": Row(lambda m, x: sum(m.a(x[i : i + 1]) for i in range(x.shape[0]))),
    "samples in turns": Row(_in_turns),
    "unbind": Row(lambda m, x: torch.stack([m.a(sample) for sample in x.unbind()])),
    "split into pieces": Row(lambda m, x: torch.cat([m.a(part) for part in x.split(2)])),
    "chunk": Row(lambda m, x: torch.cat([m.a(part) for part in x.chunk(2)])),
    "size decides": Row(lambda m, x: m.a(x) if x.shape[0] > 4 else m.a(x) * 2),
    "parity decides": Row(lambda m, x: m.a(x) if x.shape[0] % 2 == 0 else m.a(x) * 2),
    "larger of the size": Row(lambda m, x: m.a(x) * max(x.shape[0], 3)),
}

REFUSED = {
    "flag of data": Row(lambda m, x: m.a(x) * (x > 0).any().item(), "decides by what is in"),
    "flags of data": Row(lambda m, x: m.a(x) * (x > 0)[0].tolist()[0], "decides by what is in"),
    "name of data": Row(lambda m, x: m.a(x) * len(f"{x.sum().item()}"), "decides by what is in"),
    "text of data": Row(lambda m, x: m.a(x) * len(str(x.sum())), "prints what is in"),
    "formatted data": Row(lambda m, x: m.a(x) * len(f"{x.sum():.1f}"), "prints what is in"),
    "text of a weight": Row(lambda m, x: m.a(x) * len(str(m.a.bias)), "prints weights"),
    "number of data in json": Row(
        lambda m, x: m.a(x) * len(json.dumps(x.sum().item())), "TypeError: .* while it is traced"
    ),
    "int of data": Row(lambda m, x: m.a(x) * int(x.max()), "reads a number"),
    "float of data": Row(lambda m, x: m.a(x) * float(x.max()), "reads a number"),
    "slice by data": Row(lambda m, x: m.a(x)[: int(x.abs().max()) + 1], "reads a number"),
    "random scale": Row(lambda m, x: m.a(x) * random.uniform(0.5, 1.5), "draws a random number"),
    "numpy scale": Row(lambda m, x: m.a(x) * np.random.rand(), "draws a random number"),
    "numpy rows": Row(_numpy_rows, "draws a random number"),
    "random depth": Row(
        lambda m, x: m.b(m.a(x)) if random.random() < 0.5 else m.a(x), "draws a random number"
    ),
    "depth by torch": Row(
        lambda m, x: m.b(m.a(x)) if torch.rand(()) < 0.5 else m.a(x), "decides by a random number"
    ),
    "seeds": Row(_seeds, "calls torch.manual_seed"),
    "own generator": Row(_generator, "draws from its own torch.Generator"),
}


def same_as_module(captured: CapturedModel, num_samples: int) -> bool:
    """Whether graph and module agree on new data; False where a guard raises."""
    x = torch.randn(num_samples, 4)
    for training in (True, False):
        captured.module.train(training)
        torch.manual_seed(1)
        expected = captured.module(x)
        torch.manual_seed(1)
        try:
            got = run_whole(captured, x)
        except GuardError as error:
            return __file__ not in str(error)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    return True


@pytest.mark.parametrize("name", FOLLOWS)
@pytest.mark.parametrize("traced", [2, 4])
def test_what_follows_the_micro_batch(name: str, traced: int) -> None:
    captured = capture(Trap(FOLLOWS[name]), (torch.randn(traced, 4),))
    for num_samples in (1, 3, 4, 7):
        assert same_as_module(captured, num_samples)


@pytest.mark.parametrize("name", GUARDED)
def test_what_is_guarded(name: str) -> None:
    captured = capture(Trap(GUARDED[name].function), (torch.randn(4, 4),))
    assert same_as_module(captured, 4)
    agrees = [same_as_module(captured, num_samples) for num_samples in (1, 2, 3, 5, 7)]
    assert not all(agrees)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_refused(name: str, seed: int) -> None:
    random.seed(seed)
    row = REFUSED[name]
    code = row.function.__code__
    lines = "|".join(str(code.co_firstlineno + offset) for offset in range(3))
    with pytest.raises(CaptureError, match=rf"{__file__}:({lines}) [\s\S]*{row.says}|{row.says}"):
        capture(Trap(row.function), (torch.randn(4, 4),))


def test_a_draw_is_told_with_its_line_and_its_remedy_once() -> None:
    function = REFUSED["random scale"].function
    line = f"{__file__}:{function.__code__.co_firstlineno}"
    with pytest.raises(CaptureError, match=line) as refused:
        capture(Trap(function), (torch.randn(4, 4),))
    assert str(refused.value).count("leaf_modules=") == 1
    (reason,) = capture(Kept(function), (torch.randn(4, 4),)).kept_whole
    assert reason.startswith(f"Trap stays whole: {line}")
    assert reason.endswith("compute with the tensor")


class Kept(nn.Module):
    """A trap inside of a sub-module."""

    def __init__(self, function: Callable[[Trap, Tensor], Tensor]) -> None:
        super().__init__()
        self.trap, self.head = Trap(function), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trap(x))


class Adapted(nn.Module):
    """Calls a layer with another weight, and sets a buffer in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        given = {"weight": self.layer.weight + self.change, "bias": self.layer.bias}
        if self.training:
            self.mean = self.mean * 0.9 + 0.1 * x.detach().mean(0)
        return torch.func.functional_call(self.layer, given, (x,)) - self.mean


def test_what_a_whole_module_does_with_its_parts() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Adapted()), nn.Linear(4, 2))
    captured = assert_partitions_exact(module, torch.randn(4, 4))
    assert captured.leaf_modules == ("0", "1.0", "2")
    assert [line for line in captured.kept_whole if line.startswith("Adapted stays whole")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", sorted(REFUSED.keys() - {"seeds", "own generator"}))
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_sub_module_that_decides_is_one_operator(name: str, seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    captured = capture(Kept(REFUSED[name].function), (torch.randn(4, 4),))
    assert [operator.name for operator in captured.graph] == ["trap", "head"]
    x = torch.randn(3, 4)
    for training in (True, False):
        captured.module.train(training)
        for draw in range(4):  # decides anew every time
            results = []
            for function in (captured.module, functools.partial(run_whole, captured)):
                torch.manual_seed(draw)
                random.seed(draw)
                np.random.seed(draw)
                results.append(function(x))
            torch.testing.assert_close(results[0], results[1])
