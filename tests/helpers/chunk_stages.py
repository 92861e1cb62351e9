"""Stages on chunks of vertices, run one after the other in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gpp.gnn import ChunkedModel
from lightning_gpp.gnn.chunked_model import ChunkStage
from lightning_gpp.planner import Plan, Stage
from lightning_gpp.planner.ways import plan_in_ways


def stages_of(model: ChunkedModel, num_stages: int) -> list[ChunkStage]:
    """The operators in order, divided into stages, which ways divide further."""
    names = [operator.name for operator in model.in_ways.first_way()]
    cuts = [len(names) * i // num_stages for i in range(num_stages + 1)]
    divided = [names[start:stop] for start, stop in zip(cuts, cuts[1:])]
    plan = Plan(tuple(Stage(i, tuple(part), (i,)) for i, part in enumerate(divided)))
    placed = plan_in_ways(plan, model.in_ways)
    parts = [[model.graph.operator[n] for n in stage.operators] for stage in placed.stages]
    stages = []
    for index, part in enumerate(parts):
        made = {value.name for operator in part for value in operator.outputs}
        read = dict.fromkeys(n for operator in part for n in operator.inputs if n not in made)
        later = {n for other in parts[index + 1 :] for operator in other for n in operator.inputs}
        outputs = [n for n in made if n in later or n in model.graph.outputs]
        stages.append(model.stage([o.name for o in part], list(read), sorted(outputs)))
    return stages


def train(
    model: ChunkedModel,
    stages: Sequence[ChunkStage],
    inputs: dict[str, Tensor],
    order: Sequence[int],
    loss: Any,
) -> Tensor:
    """One epoch as a pipeline runs it: gradients of all parameters; the scores of all vertices."""
    model.begin_epoch()
    flights: dict[int, list[tuple[dict[str, Tensor], dict[str, Tensor]]]] = {}
    (name,) = model.graph.outputs
    for chunk in order:
        values: dict[str, Tensor] = dict(inputs)
        flights[chunk] = []
        for stage in stages:
            own = {n: values[n].detach() for n in stage.inputs}
            for n, tensor in own.items():
                tensor.requires_grad_(values[n].requires_grad)
            outputs = dict(
                zip(stage.outputs, stage(list(own.values()), chunk, training=True), strict=True)
            )
            flights[chunk].append((own, outputs))
            values |= outputs
    leaves = {chunk: flights[chunk][-1][1][name].detach().requires_grad_() for chunk in order}
    scores = torch.cat([leaves[chunk] for chunk in order])
    rows = model.chunks.order_of(order)
    scores = torch.zeros_like(scores).index_copy(0, rows, scores)
    loss(scores).backward()
    for chunk in reversed(order):
        gradients: dict[str, Tensor] = {name: leaves[chunk].grad}
        for own, outputs in reversed(flights[chunk]):
            found = [n for n in outputs if n in gradients and outputs[n].requires_grad]
            torch.autograd.backward([outputs[n] for n in found], [gradients.pop(n) for n in found])
            for n, tensor in own.items():
                if tensor.grad is not None:
                    gradients[n] = gradients.get(n, 0) + tensor.grad
    return scores.detach()
