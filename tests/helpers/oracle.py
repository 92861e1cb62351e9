"""``torch.distributed.pipelining``'s 1F1B on a chain: what our pipeline must reproduce."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from helpers.models import DataSpec
from helpers.modules import ChainModel


@dataclass
class OracleStep:
    """One training step of one rank.

    Attributes:
        output: of the whole mini-batch (last rank).
        losses: of every micro-batch (last rank).
        gradients: by the name in :class:`~helpers.modules.ChainModel`, of this rank's layers.
    """

    output: Tensor | None = None
    losses: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)


def run_schedule_1f1b(cuts: list[int], num_microbatches: int, data: DataSpec) -> OracleStep:
    """One step with torch's schedule; rank ``i`` has the layers ``cuts[i]`` to ``cuts[i + 1]``."""
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model = ChainModel().to(getattr(torch, data.dtype))
    start, end = cuts[rank], cuts[rank + 1]
    piece = model.layers[start:end]
    stage = PipelineStage(piece, rank, num_ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, num_microbatches, loss_fn=nn.functional.mse_loss)
    (inputs,), target = data.tensors()
    x, y = inputs[: data.batch_size], target[: data.batch_size]
    step = OracleStep()
    feed = (x,) if rank == 0 else ()
    if rank == num_ranks - 1:
        step.output = schedule.step(*feed, target=y, losses=step.losses).detach()
    else:
        schedule.step(*feed)
    step.losses = [loss.detach() for loss in step.losses]
    for name, parameter in piece.named_parameters():  # a slice keeps its layers' names
        assert parameter.grad is not None
        step.gradients[f"layers.{name}"] = parameter.grad
    return step


def module_rows(cuts: list[int]) -> list[list[str]]:
    """The same division as a plan by module names."""
    return [
        [f"layers.{i}" for i in range(start, end)]
        for start, end in zip(cuts[:-1], cuts[1:], strict=True)
    ]
