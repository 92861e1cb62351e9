"""Lightning's ``ThroughputMonitor`` counts a pipeline as one replica.

It multiplies the samples per second that it sees on rank 0 by the number of ranks, which is right
where every rank trains on samples of its own. The ranks of a pipeline train on the same ones.
"""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ThroughputMonitor

from lightning_gpp.strategy.lightning_private import throughputs_of


def count_pipelines(trainer: pl.Trainer, num_pipelines: int) -> None:
    """Makes the rates those of pipelines, each with the arithmetic of all its devices available."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ThroughputMonitor):
            for throughput in throughputs_of(callback):
                if throughput.available_flops is not None:
                    throughput.available_flops *= throughput.world_size // num_pipelines
                throughput.world_size = num_pipelines
