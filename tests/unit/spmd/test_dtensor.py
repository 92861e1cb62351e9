"""torch's distributed tensors as an oracle: what both know, both say.

Every rule with even shards is given to ``torch.distributed.tensor`` on a pretended mesh of two
devices. Where it runs the operator on these placements as they are (without moving anything), its
outputs have to lie as the rule says. It knows neither uneven shards nor parts of a dimension
(``outer``), and moves data where it has no strategy, which says nothing about a rule.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from helpers.spmd_graphs import call, export_graph
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_gpp.spmd.placement import PARTIAL, Placement
from lightning_gpp.spmd.program import Option
from lightning_gpp.spmd.rules.theory import Rule, Theory


class Even(nn.Module):
    """Operators of transformers and classifiers; all dimensions are even."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(8, 12), nn.LayerNorm(12)
        self.up, self.down = nn.Linear(12, 16), nn.Linear(16, 12)
        self.weight = nn.Parameter(torch.randn(12, 4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.table(tokens))
        heads = x.unflatten(-1, (2, 6)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads * 2, heads + heads)
        x = x + mixed.transpose(1, 2).reshape(x.shape)
        x = x + self.down(F.gelu(self.up(x)))
        y = torch.relu(x).view(-1, 12) @ self.weight
        z = torch.cat([y, y.neg()], 1).softmax(-1)
        shown = torch.stack([z, torch.sigmoid(z)], 0).permute(1, 0, 2).sum(0)
        return shown.unsqueeze(0).expand(4, -1, -1).mean(2) + torch.bmm(x, x.transpose(1, 2)).sum()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


def theirs(placement: Placement) -> Shard | Partial | Replicate:
    if placement.is_shard:
        return Shard(placement.dim)
    return Partial() if placement == PARTIAL else Replicate()


def is_known(rule: Rule) -> bool:
    """Whether torch has such placements; what an option adds is ours.

    So is to expand a replica to one's own part of a new dimension: torch is given the whole size.
    """
    placed = (*rule.inputs, *rule.outputs)
    if all(p.is_replicated for p in rule.inputs) and any(p.is_shard for p in rule.outputs):
        return False
    if any(p.outer > 1 or (p.is_shard and p.units % 2) for p in placed):
        return False
    return rule.option in (Option.PLAIN, Option.MEAN)


def test_no_rule_contradicts_torch(mesh: DeviceMesh) -> None:
    exported = export_graph(Even(), torch.zeros(4, 6, dtype=torch.int64))
    graph, theory = exported.graph, Theory(exported.graph, 2)
    seen: Counter[str] = Counter()
    contradictions = []
    for operator in graph.operators:
        shapes = [graph.value_of[name].shape for name in operator.outputs]
        for rule in filter(is_known, theory.rules(operator)):
            inputs = []
            for name, placement in zip(operator.inputs, rule.inputs):
                value = graph.value_of[name]
                whole = torch.zeros(value.shape, dtype=getattr(torch, value.spec.dtype))
                local = whole.chunk(2, placement.dim)[0] if placement.is_shard else whole
                inputs.append(
                    DTensor.from_local(
                        *(local.contiguous(), mesh, [theirs(placement)]),
                        shape=whole.shape,
                        stride=whole.stride(),
                    )
                )
            # Attention in products and a softmax: torch takes 15 s to follow its fused kernel.
            with (
                warnings.catch_warnings(),
                CommDebugMode() as moves,
                torch.no_grad(),
                sdpa_kernel(SDPBackend.MATH),
            ):
                warnings.simplefilter("ignore")
                try:
                    made = call(exported.nodes[operator.name], inputs, shapes)
                except (RuntimeError, NotImplementedError, AssertionError):
                    seen["refused"] += 1
                    continue
            if moves.get_total_counts():
                seen["moved"] += 1
                continue
            found = [each.placements[0] for each in made]
            expected = [theirs(placement) for placement in rule.outputs]
            agrees = all(
                type(a) is type(b) and getattr(a, "dim", None) == getattr(b, "dim", None)
                for a, b in zip(found, expected)
            )
            seen["agreed" if agrees else "contradicted"] += 1
            if not agrees:
                contradictions.append(f"{operator.kind}: {rule}; torch: {found}")
    assert not contradictions, "\n".join(contradictions)
    assert seen["agreed"] > 60, seen
