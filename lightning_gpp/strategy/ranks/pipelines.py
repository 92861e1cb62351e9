"""Several pipelines side by side: which ranks make which, and how they agree.

Lightning's strategies take ranks for replicas of the model. The ranks of a pipeline are its parts:
together they are one replica, so nothing is split or averaged over them, but over the pipelines.

With N ranks and P pipelines, ranks 0 to N/P - 1 make the first pipeline, the next N/P the second,
and so on, so that pipelines stay inside of hosts where their size allows it. What they share goes
through :class:`~lightning_gpp.runtime.processes.peers.Peers`.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from lightning_gpp.runtime.processes.peers import Peers
from lightning_gpp.runtime.processes.rank_devices import meet
from lightning_gpp.strategy.lightning_private import distributed_is_initialized
from lightning_gpp.strategy.ranks.control import Control


class PipelinesStrategy(ParallelStrategy):
    """What Lightning asks of the ranks of a strategy, for ranks that make replicas together.

    Attributes:
        num_pipelines: replicas, of as many ranks each.
        peers: this rank in the other pipelines, once ranks are joined; None if there is one.
    """

    num_nodes: int
    num_pipelines: int = 1
    peers: Peers | None = None
    skips_step = False
    """Whether the training step that has just run returned None, on all ranks."""

    # Places ----------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning must split the data: where there are several pipelines."""
        return self.num_pipelines > 1

    @property
    def world_size(self) -> int:
        """Ranks of all pipelines.

        Once after a step that returned None it is 1: Lightning refuses such steps on several
        ranks, as replicas would not agree; those of one replica do.
        """
        if self.skips_step and self.num_pipelines == 1:
            self.skips_step = False
            return 1
        return super().world_size

    @property
    def root_device(self) -> torch.device:
        """Device of this rank's stages."""
        devices = self.parallel_devices
        assert devices is not None
        sees_own_alone = len(devices) == 1 and self.num_processes > 1
        return devices[0 if sees_own_alone else self.local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks on this host: one per device, or as many as were started where each sees its own.

        Ray's workers do so, and all that use a CPU.
        """
        environment, num_devices = self.cluster_environment, len(self.parallel_devices or ())
        if environment is None or not environment.creates_processes_externally:
            return num_devices
        return max(num_devices, environment.world_size() // self.num_nodes)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Which samples this rank's pipeline reads."""
        pipeline = self.global_rank // (super().world_size // self.num_pipelines)
        return {"num_replicas": self.num_pipelines, "rank": pipeline}

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
    def control(self) -> Control | None:
        """Messages between the ranks of a run that is under way; None before and after.

        Agreement goes by them: a collective of torch waits for a rank that has failed.
        """
        return None

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
            control = self.control
            with self.guarded():
                if control is None:
                    meet()
                    return
                control.meet("waiting at a barrier")
                if self.peers is not None:
                    self.peers.meet("a barrier of all pipelines")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """One rank's object on all ranks."""
        if not distributed_is_initialized():
            return obj
        control = self.control
        pipeline, place = divmod(src, dist.get_world_size() // self.num_pipelines)
        if self.user_code_alone is None or place != 0:
            with self.guarded():
                if control is None:
                    objects = [obj]
                    dist.broadcast_object_list(objects, src)
                    return objects[0]
                own = obj if control.rank == place else None
                purpose = f"waiting for what rank {src} has"
                obj = control.combined(own, lambda every: every[place], purpose)
        if self.peers is not None:
            return self.peers.share(obj, "what one pipeline tells the others", root=pipeline)
        return obj

    def total(self, number: Tensor) -> Tensor:
        """All ranks of a pipeline: the sum of a number of each; outside of a run all of the job."""
        control = self.control
        with self.guarded():
            if control is not None:
                number = control.combined(number, sum, "waiting for a sum over the ranks")
            elif dist.is_initialized():
                dist.all_reduce(number)
        return number

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces over pipelines; of one, the tensor stays as it is.

        Args:
            tensor: of this rank, equal on all ranks of a pipeline.
            group: not used: it is the peers.
            reduce_op: ``"mean"``, ``"sum"``, ``"min"``, ``"max"`` or ``"product"``, or the same of
                torch's.

        Raises:
            ValueError: it is another.
        """
        if (peers := self.peers) is None or not isinstance(tensor, Tensor):
            return tensor
        name = str(reduce_op or "sum").rpartition(".")[2].upper()
        is_mean = name in ("MEAN", "AVG")
        op = dist.ReduceOp.SUM if is_mean else getattr(dist.ReduceOp, name, None)
        if op is None:
            known = "mean, sum, min, max, product"
            raise ValueError(f"reduce_op={reduce_op!r} over pipelines; known: {known}")
        reduced = peers.reduced(tensor, op, "reducing a value over the pipelines")
        return reduced / self.num_pipelines if is_mean else reduced

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gathers over pipelines, along a new first dimension; of one, it stays as it is.

        Raises:
            NotImplementedError: gradients are to flow through it.
        """
        if (peers := self.peers) is None:
            return tensor
        if sync_grads and tensor.requires_grad:
            raise NotImplementedError(
                "all_gather(sync_grads=True) over pipelines: no gradient flows from one pipeline "
                "to another. Gather detached values, or use pipelines=1"
            )
        gathered = peers.gather(tensor.detach().cpu(), "gathering a value of all pipelines")
        return torch.stack(gathered).to(tensor.device)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all (or any) ranks say yes."""
        if not distributed_is_initialized():
            return decision
        if (control := self.control) is None:
            votes, num_ranks = self.total(torch.tensor(int(decision))), dist.get_world_size()
            return bool(votes == num_ranks if all else votes)
        if self.user_code_alone is None:
            votes = self.total(torch.tensor(int(decision)))
            decision = bool(votes == control.num_ranks if all else votes)
        if self.peers is None:
            return decision
        op = dist.ReduceOp.MIN if all else dist.ReduceOp.MAX
        vote = torch.tensor(int(decision))
        return bool(self.peers.reduced(vote, op, "deciding with all pipelines"))
