"""Several pipelines side by side: which ranks make which, and how they join.

With N ranks and P pipelines, ranks 0 to N/P - 1 make the first pipeline, the next N/P the second,
and so on, so that pipelines stay inside of hosts where their size allows it. To
``torch.distributed`` each is a world of its own; what they share goes through
:class:`~lightning_gpp.runtime.processes.peers.Peers`.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeGuard

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from lightning_gpp.runtime.processes.peers import Peers

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
