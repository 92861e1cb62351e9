"""Models that no machine here could hold, planned for 64 devices and emulated there as shapes.

A GPT of 24 layers and two towers whose tables have 1,000 million rows are captured on the meta
device, planned, and run by the real executor, messages and sums on 64 emulated devices (a thread
each; tensors have shapes and no numbers). Beside the emulated step stands the predicted one, and
beside the memory that the plan expects of its devices what the whole model takes.

    python benchmarks/large_shapes.py                              # both, on 64 devices
    python benchmarks/large_shapes.py --models gpt --devices 16

Costs are estimated from data sheets (float16 products), so times compare plans and say nothing of
how fast a GPU is.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from helpers.threads.shapes import emulate_plan
from torch import Tensor, nn
from torch.nn import functional

from lightning_gpp.capture import capture
from lightning_gpp.cluster import cluster_preset
from lightning_gpp.cost import estimate_costs
from lightning_gpp.planner import PLANNERS, evaluate_plan, plan_request
from lightning_gpp.text_table import text_table
from lightning_gpp.units_of_measure import bytes_text, seconds_text


class Block(nn.Module):
    """A layer of a GPT."""

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Causal attention, then two linear operators."""
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):
    """24 layers, 11,500 million parameters."""

    minibatch_size, length, vocabulary, hidden = 512, 1024, 50257, 6144
    num_layers, num_heads = 24, 48
    values_per_weight = 2  # of Adam

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(self.vocabulary, self.hidden)
        blocks = (Block(self.hidden, self.num_heads) for _ in range(self.num_layers))
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(self.hidden)
        self.head = nn.Linear(self.hidden, self.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next token."""
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def inputs(self) -> tuple[Tensor, ...]:
        """Of two samples."""
        return (torch.zeros(2, self.length, dtype=torch.long),)


class Tower(nn.Module):
    """Features of a user or an item, each with a table."""

    def __init__(self, num_tables: int, num_rows: int, width: int, hidden: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(num_rows, width) for _ in range(num_tables))
        self.layers = nn.Sequential(
            nn.Linear(num_tables * width, hidden),
            *[nn.Sequential(nn.ReLU(), nn.Linear(hidden, hidden)) for _ in range(4)],
        )

    def forward(self, indices: Tensor) -> Tensor:
        """A vector for each sample."""
        rows = [table(indices[:, i]) for i, table in enumerate(self.tables)]
        return self.layers(torch.cat(rows, dim=1))


class TwoTower(nn.Module):
    """Twenty tables of 50 million rows: 1,000 million rows of 64 numbers."""

    minibatch_size, num_tables, num_rows, bag = 65536, 10, 50_000_000, 20
    values_per_weight = 0  # of plain SGD

    def __init__(self) -> None:
        super().__init__()
        self.user = Tower(self.num_tables, self.num_rows, 64, 4096)
        self.item = Tower(self.num_tables, self.num_rows, 64, 4096)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """How well users and items fit."""
        return (self.user(users) * self.item(items)).sum(dim=1)

    def inputs(self) -> tuple[Tensor, ...]:
        """Of two samples."""
        rows = torch.zeros(2, self.num_tables, self.bag, dtype=torch.long)
        return rows, rows


MODELS = {"gpt": Gpt, "two_tower": TwoTower}


def rows_of(name: str, num_devices: int, cluster_name: str) -> list[list[str]]:
    """What there is to say of a model."""
    start_s = time.monotonic()
    with torch.device("meta"):
        model = MODELS[name]()
        captured = capture(model, model.inputs())
    captured_s = time.monotonic() - start_s
    cluster = cluster_preset(cluster_name, num_devices)
    size = model.minibatch_size
    costs = estimate_costs(captured.graph, cluster, minibatch_size=size, dtype="float16")
    request = plan_request(
        captured.graph,
        cluster,
        minibatch_size=size,
        costs=costs,
        optimizer_values=model.values_per_weight,
        may_recompute=True,
    )
    start_s = time.monotonic()
    plan = PLANNERS["graphpipe"](request)
    planned_s = time.monotonic() - start_s
    found = evaluate_plan(plan, request)
    run = emulate_plan(plan, request, timeout_s=600.0)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    states = 2 + model.values_per_weight
    memory = sorted(device.memory_bytes for device in found.devices)
    sizes = Counter(len(stage.devices) for stage in plan.stages)
    return [
        ["operators, captured in", f"{len(captured.graph)}, {seconds_text(captured_s)}"],
        ["weights", bytes_text(weights)],
        ["weights, gradients, optimizer state", bytes_text(states * weights)],
        ["planned in", seconds_text(planned_s)],
        ["stages", ", ".join(f"{num} on {each} devices" for each, num in sorted(sizes.items()))],
        ["micro-batches", str(plan.num_microbatches)],
        ["step predicted", seconds_text(found.step_s)],
        ["step emulated", f"{seconds_text(run.step_s)}, {run.step_s / found.step_s - 1:+.2%}"],
        ["slip of it", f"{run.slip.total_s / run.step_s:.2%}"],
        ["memory of a device", bytes_text(found.devices[0].limit_bytes or 0)],
        [
            "least, median, most used",
            ", ".join(map(bytes_text, (memory[0], memory[len(memory) // 2], memory[-1]))),
        ],
    ]


def main() -> None:
    """Prints a table for each model."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--cluster", default="dgx_h100")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.models:
        rows = rows_of(name, given.devices, given.cluster)
        print(f"\n{name} on {given.devices} devices of {given.cluster}\n")
        print(text_table(["", name], rows, left={""}), flush=True)


if __name__ == "__main__":
    main()
