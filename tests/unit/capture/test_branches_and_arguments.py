"""Forks, joins, nested arguments and outputs, blocks given by hand."""

from __future__ import annotations

import collections
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from pipelined import assert_partitions_exact, data
from torch import Tensor, nn

from lightning_gpp.capture import Block, BlockGraph, capture
from lightning_gpp.capture.errors import CaptureError

pytestmark = pytest.mark.filterwarnings("error")


class TwoTowers(nn.Module):
    """A shared tensor feeds two towers; a skip goes around the second one.

            ┌─ a ─────────┐
    x ─ stem┤             ├─ head
            └─ b ─ c ─(+)─┘
                └──────┘
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(6, 5)
        self.c, self.head = nn.Linear(5, 5), nn.Linear(10, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.stem(x))
        a, b = self.a(h), self.b(h)
        return self.head(torch.cat([a, b + self.c(b).relu()], dim=1))


def test_two_towers_with_a_shared_tensor_and_a_skip() -> None:
    captured = assert_partitions_exact(TwoTowers(), data(4, 4, grad=True))
    assert [operator.name for operator in captured.graph] == [
        *("stem", "tanh", "a", "b", "c", "relu", "add", "cat", "head")
    ]
    assert captured.graph.predecessors["cat"] == ("a", "add")
    assert captured.graph.operator["c"].parameters == ("c.weight", "c.bias")
    assert captured.graph.inputs[0].requires_grad
    assert captured.graph.values["cat"].tensors[0].shape == (4, 10)
    assert captured.graph.values["cat"].tensors[0].batch_dim == 0


class ManyInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(2, 4), nn.Linear(5, 4)

    def forward(
        self, x: Tensor, *, batch: dict[str, Tensor], rest: list[Tensor], mask: Tensor | None = None
    ) -> Tensor:
        total = self.a(x) + self.b(batch["image"]) * batch["scale"]
        for item in rest:
            total = total + self.c(item)
        return total if mask is None else total * mask


def test_positional_keyword_dict_and_list_inputs() -> None:
    batch = {"image": data(4, 2), "scale": data(4, 1, grad=True)}
    rest = [data(4, 5), data(4, 5)]
    captured = assert_partitions_exact(ManyInputs(), data(4, 3), batch=batch, rest=rest)
    names = [item.value.name for item in captured.graph.inputs]
    assert names == ["x", "batch_image", "batch_scale", "rest_0", "rest_1"]


@dataclass
class Both:
    logits: Tensor
    extra: Any = None


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class ModelOutput(collections.OrderedDict[str, Any]):
    """As transformers has them: a dict with attributes, unknown to pytree."""


class Outputs(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.a, self.b = kind, nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        y = self.b(h)
        return {
            "dict": lambda: {"y": y, "nested": (h, [y.sum(1)], None, "text", 3)},
            "tuple": lambda: (y, h, y),
            "dataclass": lambda: Both(y, {"h": h}),
            "namedtuple": lambda: Pair(h, y),
            "model_output": lambda: ModelOutput(logits=y, hidden=(h, y)),
            "input": lambda: (y, x),
            "parameter": lambda: (y, self.a.weight),
            "size": lambda: (y, x.shape[0]),
        }[self.kind]()


@pytest.mark.parametrize(
    "kind",
    ["dict", "tuple", "dataclass", "namedtuple", "model_output", "input", "parameter", "size"],
)
def test_nested_outputs(kind: str) -> None:
    assert_partitions_exact(Outputs(kind), data(4, 3), num_partitions=3)


class DataclassInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 2)

    def forward(self, batch: Both) -> Tensor:
        return self.a(batch.logits) * batch.extra["scale"]


def test_dataclass_input_without_registration() -> None:
    captured = assert_partitions_exact(
        DataclassInput(), Both(data(4, 3), {"scale": data(4, 1)}), num_partitions=3
    )
    names = [item.value.name for item in captured.graph.inputs]
    assert names == ["batch_logits", "batch_extra_scale"]


class Flags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x: Tensor, twice: bool, mask: Tensor | None = None, p: float = 1.0) -> Tensor:
        h = self.a(x) * p
        h = self.a(h) if twice else h
        return h if mask is None else h * mask


def test_arguments_that_are_no_tensors_are_frozen_and_checked() -> None:
    captured = assert_partitions_exact(Flags(), data(4, 3), True)
    x = data(4, 3)
    assert captured.inputs((x,), {"twice": True, "mask": None}) == {"x": x}
    with pytest.raises(ValueError, match=r"'twice' was True .* got False\. Pass the same"):
        captured.inputs((x, False), {})
    with pytest.raises(
        ValueError, match=r"'p' was 1\.0 .* got 0\.5\. .* pass a tensor from the first"
    ):
        captured.inputs((x, True, None, 0.5), {})
    with pytest.raises(ValueError, match=r"'mask' was None .* got a tensor"):
        captured.inputs((x, True, x), {})
    with pytest.raises(ValueError, match=r"'x' was torch.float32 .* got torch.float64"):
        captured.inputs((x.double(), True), {})


def decorated(kind: str) -> Any:
    """Decorators that look at what the call gave by keyword."""

    def decorate(forward: Any) -> Any:
        @functools.wraps(forward)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if kind == "sets a default":
                kwargs.setdefault("scale", 2.0)
            if kind == "asks for a keyword" and "x" not in kwargs:
                raise TypeError("give x by keyword")
            if kind == "supplies an argument":
                kwargs["must"] = 3.0
            return forward(self, *args, **kwargs)

        return call

    return decorate


def scaled(kind: str) -> nn.Module:
    """Behind a decorator, or as it is."""

    class Scaled(nn.Linear):
        if kind == "supplies an argument":

            @decorated(kind)
            def forward(self, x: Tensor, must: float) -> Tensor:
                return super().forward(x) * must

        else:

            @decorated(kind)
            def forward(self, x: Tensor, scale: float = 1.0, **rest: Any) -> Tensor:
                return super().forward(x) * scale

    return Scaled(3, 3)


@pytest.mark.parametrize("kind", ["sets a default", "asks for a keyword", "supplies an argument"])
def test_a_decorated_forward_is_called_as_the_user_calls_it(kind: str) -> None:
    captured = assert_partitions_exact(scaled(kind), x=data(4, 3))
    assert [item.value.name for item in captured.graph.inputs] == ["x"]


class Bounded(nn.Module):
    """Changes its own parameter."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(3, 3)
        self.table = nn.Embedding(4, 3, max_norm=0.1 if kind == "max_norm" else None)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        if self.kind == "data":
            weight.data = weight.data.clamp(-0.1, 0.1)
        elif self.kind == "in place":
            with torch.no_grad():
                weight.clamp_(-0.1, 0.1)
        return self.linear(self.table(x))


@pytest.mark.parametrize("kind", ["max_norm", "data", "in place"])
def test_a_forward_that_changes_a_parameter_is_named_at_its_first_call(kind: str) -> None:
    with pytest.raises(CaptureError, match=r"changes or replaces the parameters '.*weight'"):
        capture(Bounded(kind), (torch.arange(4),))


class Pairs(nn.Module):
    """Compares the rows of a batch two by two: takes two of them, and no odd number."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.a(x).view(-1, 2, 4).unbind(1)
        return (first - second).square()


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(2, 4)})
        self.fusion = nn.Bilinear(4, 4, 2)

    def forward(self, x_a: Tensor, x_b: Tensor) -> Tensor:
        if x_a.sum().item() == 12345.0:
            raise RuntimeError
        return self.fusion(self.encoders["a"](x_a), self.encoders["b"](x_b))


def test_blocks_given_by_the_user() -> None:
    blocks = BlockGraph(
        blocks=(
            Block(name="a", module="encoders.a", inputs=("x_a",)),
            Block(name="b", module="encoders.b", inputs=("x_b",)),
            Block("fuse", "fusion", ("a", "b")),
        ),
        outputs=("fuse",),
    )
    captured = assert_partitions_exact(
        Untraceable(), data(4, 3), data(4, 2), options={"blocks": blocks}
    )
    assert [operator.name for operator in captured.graph] == ["a", "b", "fuse"]


class Keyworded(nn.Module):
    """Its arguments have names that code which calls it may have, too."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)

    def forward(self, *, module: Tensor, node: Tensor, n: int, name: str, args: Tensor) -> Tensor:
        return self.net(module) * node + args * n * len(name)


class KeywordsOfCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.opened, self.whole = Keyworded(), Keyworded()

    def forward(self, x: Tensor) -> Tensor:
        x = self.opened(module=x, node=x, n=2, name="x", args=x)
        x = self.whole(module=x, node=x, n=3, name="x", args=x)
        spectrum = torch.fft.rfft(x, n=4)
        loss = nn.functional.mse_loss(input=x, target=x.tanh(), reduction="none")
        return torch.fft.irfft(spectrum, n=4) + loss


def test_keywords_of_calls_are_those_of_nothing_else() -> None:
    captured = assert_partitions_exact(
        KeywordsOfCalls(), data(4, 4), options={"leaf_modules": ["whole"]}
    )
    assert "whole" in captured.graph.operator
