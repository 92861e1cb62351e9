"""Several pipelines side by side: which ranks make which, how they join, and how they agree.

Lightning's strategies take ranks for replicas of the model. The ranks of a pipeline are its parts:
together they are one replica, so nothing is split or averaged over them, but over the pipelines.

With N ranks and P pipelines, ranks 0 to N/P - 1 make the first pipeline, the next N/P the second,
and so on, so that pipelines stay inside of hosts where their size allows it. To
``torch.distributed`` each is a world of its own; what they share goes through
:class:`~lightning_gpp.runtime.processes.peers.Peers`.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from lightning_gpp.runtime.processes.peers import Peers
from lightning_gpp.runtime.processes.rank_devices import meet
from lightning_gpp.strategy.lightning_private import distributed_is_initialized
from lightning_gpp.strategy.ranks.control import Control

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JoinedPipelines:
    """The pipelines of this process, which it has joined for good: torch knows one world.

    Attributes:
        world: this pipeline's.
        peers: of this rank.
        store: of all ranks.
        run: number of the run of this process.
    """

    world: dist.ProcessGroup
    peers: Peers
    store: Store
    run: int = 0

    def again(self, timeout_s: float, device: torch.device) -> JoinedPipelines:
        """All ranks: the same for another run, whatever has become of the last one."""
        run, before = self.run + 1, self.peers
        before.leave()
        store = PrefixStore(f"place {dist.get_rank()}, run {run}", self.store)
        peers = Peers(store, before.pipeline, before.num_pipelines, timeout_s, device)
        return replace(self, peers=peers, run=run)

    def tell_failure(self, text: str) -> None:
        """Tells the other pipelines of a failure in this one; the first that is told counts."""
        self.store.compare_set(self._failure, "", text)

    def heard_failure(self) -> str | None:
        """What another pipeline has told of its failure."""
        try:
            if self.store.check([self._failure]):
                return self.store.get(self._failure).decode()
        except (RuntimeError, dist.DistError):  # the store went with rank 0
            log.debug("no store to look for other failures in")
        return None

    @property
    def _failure(self) -> str:
        return f"failure of run {self.run}"


_joined: JoinedPipelines | None = None


def join_pipelines(
    environment: ClusterEnvironment,
    backend: str,
    num_pipelines: int,
    timeout_s: float,
    device: torch.device,
) -> JoinedPipelines:
    """All ranks: joins those of the same pipeline, and the peers in the others.

    Args:
        environment: knows the ranks.
        backend: of ``torch.distributed``, inside of a pipeline.
        num_pipelines: how many there are; a divisor of the number of ranks.
        timeout_s: limit of every wait.
        device: where this rank's stages run.

    Raises:
        RuntimeError: this process has joined other ranks in another way before.
    """
    global _joined
    if dist.is_initialized():
        if is_joined(_joined) and _joined.peers.num_pipelines == num_pipelines:
            _joined = _joined.again(timeout_s, device)
            return _joined
        raise RuntimeError(_OTHER_LAYOUT.format(num_pipelines))
    rank, num_ranks = environment.global_rank(), environment.world_size() // num_pipelines
    pipeline, place = divmod(rank, num_ranks)
    timeout = timedelta(seconds=timeout_s)
    os.environ["MASTER_ADDR"] = environment.main_address
    os.environ["MASTER_PORT"] = str(environment.main_port)
    size = environment.world_size()
    store, _, _ = next(rendezvous("env://", rank=rank, world_size=size, timeout=timeout))
    store.set_timeout(timeout)
    dist.init_process_group(
        backend,
        store=PrefixStore(f"pipeline {pipeline}", store),
        rank=place,
        world_size=num_ranks,
        timeout=timeout,
    )
    peers_store = PrefixStore(f"place {place}, run 0", store)
    peers = Peers(peers_store, pipeline, num_pipelines, timeout_s, device)
    world = dist.group.WORLD
    assert world is not None
    _joined = JoinedPipelines(world, peers, store)
    return _joined


def refuse_pipelines_of_before() -> None:
    """Raises RuntimeError where this process has joined one of several pipelines."""
    if dist.is_initialized() and is_joined(_joined):
        raise RuntimeError(_OTHER_LAYOUT.format(1))


def is_joined(joined: JoinedPipelines | None) -> TypeGuard[JoinedPipelines]:
    """Whether these are pipelines of the world that torch has now."""
    return joined is not None and joined.world is dist.group.WORLD


_OTHER_LAYOUT = (
    "pipelines={} was asked for, but this process has joined the others in another way: an earlier "
    "Trainer of this script had another number of pipelines, or torch.distributed was initialized "
    "before. Use one number of pipelines in a script."
)


class PipelinesStrategy(ParallelStrategy):
    """What Lightning asks of the ranks of a strategy, for ranks that make replicas together.

    Attributes:
        num_pipelines: replicas, of as many ranks each.
        joined: this rank's pipeline and the others, once ranks are joined; None if there is one.
    """

    num_nodes: int
    num_pipelines: int = 1
    joined: JoinedPipelines | None = None
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
                else:
                    control.meet("waiting at a barrier")
                if (peers := self._peers) is not None:
                    peers.meet("a barrier of all pipelines")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """One rank's object on all ranks."""
        if not distributed_is_initialized():
            return obj
        pipeline, place = divmod(src, dist.get_world_size())
        control = self.control
        if self.user_code_alone is None or place != 0:
            with self.guarded():
                if control is None:
                    objects = [obj]
                    dist.broadcast_object_list(objects, place)
                    obj = objects[0]
                else:
                    own = obj if dist.get_rank() == place else None
                    purpose = f"waiting for what rank {src} has"
                    obj = control.combined(own, lambda every: every[place], purpose)
        if (peers := self._peers) is not None:
            return peers.share(obj, "what one pipeline tells the others", root=pipeline)
        return obj

    def total(self, number: Tensor) -> Tensor:
        """All ranks of a pipeline: the sum of a number of each."""
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
        if (peers := self._peers) is None or not isinstance(tensor, Tensor):
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
        if (peers := self._peers) is None:
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
        if self.user_code_alone is None:
            votes = int(self.total(torch.tensor(int(decision))))
            decision = votes == dist.get_world_size() if all else bool(votes)
        if (peers := self._peers) is None:
            return decision
        op = dist.ReduceOp.MIN if all else dist.ReduceOp.MAX
        return bool(peers.reduced(torch.tensor(int(decision)), op, "deciding with all pipelines"))

    @property
    def _peers(self) -> Peers | None:
        return None if self.joined is None else self.joined.peers
