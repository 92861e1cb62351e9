"""The ranks of one data-parallel replica: where they are, and how they agree.

Lightning's strategies take ranks for replicas of the model. The ranks of a pipeline are its parts:
there is one replica, so nothing is split or averaged over them.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from lightning_gpp.strategy.lightning_private import distributed_is_initialized


class OneReplicaStrategy(ParallelStrategy):
    """What Lightning asks of the ranks of a strategy, for ranks that make one replica together."""

    num_nodes: int
    skips_step = False
    """Whether the training step that has just run returned None, on all ranks."""

    # Places ----------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """False: there is one data-parallel replica, so Lightning must not split the data."""
        return False

    @property
    def world_size(self) -> int:
        """Ranks of the pipeline.

        Once after a step that returned None it is 1: Lightning refuses such steps on several
        ranks, as replicas would not agree; those of one replica do.
        """
        if self.skips_step:
            self.skips_step = False
            return 1
        return super().world_size

    @property
    def root_device(self) -> torch.device:
        """Device of this rank's stages."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks on this host."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """One replica: nothing to split."""
        return {"num_replicas": 1, "rank": 0}

    def set_world_ranks(self) -> None:
        """Tells the cluster environment who this rank is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(
                self.node_rank * self.num_processes + self.local_rank
            )
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    # Agreement -------------------------------------------------------------------------------

    def guarded(self) -> contextlib.AbstractContextManager[None]:
        """In this ranks wait for each other; a strategy may end the waiting with an error."""
        return contextlib.nullcontext()

    @property
    def user_code_alone(self) -> str | None:
        """Name of the user code that runs on rank 0 and nowhere else; None if there is none.

        Nobody would answer a collective there, so it is answered without one, as the single
        replica would on one device, or refused at once.
        """
        return None

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for all ranks; refused where only rank 0 is, which might wait for ever."""
        if distributed_is_initialized():
            with self.guarded():
                dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """One rank's object on all ranks."""
        if not distributed_is_initialized() or (self.user_code_alone is not None and src == 0):
            return obj
        objects = [obj]
        with self.guarded():
            dist.broadcast_object_list(objects, src)
        return objects[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces over data-parallel replicas. There is one, so the tensor stays as it is."""
        return tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gathers over data-parallel replicas. There is one, so the tensor stays as it is."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all (or any) ranks say yes."""
        if not distributed_is_initialized() or self.user_code_alone is not None:
            return decision
        votes = torch.tensor(int(decision))
        with self.guarded():
            dist.all_reduce(votes)
        return int(votes) == dist.get_world_size() if all else bool(votes)
