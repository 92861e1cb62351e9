"""Forwards that go through a set, whose order is another one in every process."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, fx, nn

from lightning_gpp.capture import CaptureError, capture
from lightning_gpp.capture.operators.fingerprint import in_order, node_contents
from lightning_gpp.capture.tracing.trace import Trace
from lightning_gpp.capture.values.structure import LEAF


class Tables(nn.Module):
    """A table per kind, from what is computed alike for each, as ModernBERT has them."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.kinds = kinds
        self.scales = {"full": 2.0, "sliding": 3.0, "none": 5.0}
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        tables = {}
        for kind in self.kinds:
            positions = x.abs().sqrt()
            tables[kind] = (positions * self.scales[kind]).cos()
        y: Tensor = self.head(x * tables["full"] + tables["sliding"])
        return y


def test_another_order_is_the_same_model() -> None:
    torch.manual_seed(0)
    x, one, other = torch.rand(6, 4), Tables(("full", "sliding")), Tables(("sliding", "full"))
    other.load_state_dict(one.state_dict())
    first = capture(one, (x,), {})
    followed = capture(other, (x,), {}, verified=first.verified)
    assert capture(other, (x,), {}).fingerprint != first.fingerprint
    assert followed.fingerprint == first.fingerprint
    assert [op.name for op in followed.graph] == [op.name for op in first.graph]


def test_another_model_is_refused() -> None:
    x, other = torch.rand(6, 4), Tables(("sliding", "full"))
    other.scales["full"] = 7.0
    first = capture(Tables(("full", "sliding")), (x,), {})
    with pytest.raises(CaptureError, match="captured another model than rank 0"):
        capture(other, (x,), {}, verified=first.verified)


@pytest.mark.parametrize("seed", range(40))
def test_equal_nodes_are_those_that_the_same_nodes_read(seed: int) -> None:
    """Random graphs of few kinds of nodes, so that many are equal, in another order."""
    rng = random.Random(seed)
    one = random_graph(rng)
    nodes = node_contents(Trace(one, LEAF))
    followed = in_order({True: Trace(in_another_order(one, rng), LEAF)}, nodes)[True]
    assert node_contents(followed) == nodes


def random_graph(rng: random.Random) -> fx.Graph:
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    for _ in range(rng.randrange(3, 14)):
        function, count = rng.choice([(torch.abs, 1), (torch.add, 2)])
        nodes.append(graph.call_function(function, tuple(rng.choices(nodes, k=count))))
    graph.output(tuple(rng.sample(nodes, 3)))
    graph.eliminate_dead_code()
    return graph


def in_another_order(graph: fx.Graph, rng: random.Random) -> fx.Graph:
    copy, copied = fx.Graph(), dict[fx.Node, fx.Node]()
    waiting = list(graph.nodes)
    while waiting:
        ready = [node for node in waiting if all(n in copied for n in node.all_input_nodes)]
        node = rng.choice(ready)
        waiting.remove(node)
        copied[node] = copy.node_copy(node, copied.__getitem__)
    return copy
