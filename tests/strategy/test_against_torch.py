"""torch's own 1F1B trains a chain to the weights that ours does."""

from __future__ import annotations

import torch
import torch.distributed as dist
from helpers.models import DataSpec
from helpers.modules import ChainModel
from helpers.reference import train_pipeline, weight_differences
from helpers.training import Training
from helpers.workers import WorkerPool
from torch import Tensor, nn

TRAINING = Training(ChainModel, DataSpec(num_samples=24), num_steps=6, validate=False)
CUT, NUM_MICROBATCHES = 3, 4


def train_by_torch() -> dict[str, Tensor]:
    """This rank's weights after the same steps."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    dist.init_process_group("gloo")
    rank, module, loader = dist.get_rank(), TRAINING.module(), TRAINING.data.loader()
    part = module.layers[CUT:] if rank else module.layers[:CUT]
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, NUM_MICROBATCHES, nn.functional.mse_loss)
    optimizer = module.optimizer_spec.build(list(part.parameters()))
    for (x,), target in [*loader, *loader]:
        optimizer.zero_grad()
        if rank:
            schedule.step(target=target)
        else:
            schedule.step(x)
        optimizer.step()
    trained = {id(parameter) for parameter in part.parameters()}
    return {n: p.detach() for n, p in module.named_parameters() if id(p) in trained}


def test_1f1b(pool: WorkerPool) -> None:
    names = [f"layers.{index}" for index in range(6)]
    ours = train_pipeline(
        pool,
        TRAINING,
        num_ranks=2,
        schedule="1f1b",
        num_microbatches=NUM_MICROBATCHES,
        plan=[names[:CUT], names[CUT:]],
    )
    first, second = pool.run(train_by_torch, num_ranks=2)
    assert not weight_differences(ours[0].weights, first | second, 1e-12)
