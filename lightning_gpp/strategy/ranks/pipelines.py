"""Connects the ranks of one pipeline, or of several side by side.

Lightning's strategies take ranks for replicas of the model. The ranks of a pipeline are its parts:
together they are one replica, so nothing is split or averaged over them, but over the pipelines.

With N ranks and P pipelines, ranks 0 to N/P - 1 make the first pipeline, the next N/P the second,
and so on, so that pipelines stay inside of hosts where their size allows it. What they share goes
through :class:`~lightning_gpp.runtime.processes.peers.Peers`.
"""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from lightning_gpp.runtime.processes.groups import device_backend, meet
from lightning_gpp.runtime.processes.peers import Peers
from lightning_gpp.strategy.build import build_pipeline
from lightning_gpp.strategy.devices.accelerators import (
    EmulatedAccelerator,
    OurStrategy,
    PoolAccelerator,
)
from lightning_gpp.strategy.lightning_private import (
    SubprocessScriptLauncher,
    choose_port,
    distributed_is_initialized,
    init_dist_connection,
)
from lightning_gpp.strategy.pipelined_run import PipelinedRun
from lightning_gpp.strategy.ranks.control import Control
from lightning_gpp.strategy.ranks.failure import add_note
from lightning_gpp.strategy.ranks.process_launcher import ProcessLauncher
from lightning_gpp.strategy.ranks.uncaught import show_once
from lightning_gpp.strategy.report import waiting_for
from lightning_gpp.strategy.session import Session
from lightning_gpp.strategy.settings import Settings, check_pipelines
from lightning_gpp.strategy.state.without_values import refuse_lost_weights
from lightning_gpp.strategy.step.loaders import led_loaders

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


class PipelinesStrategy(OurStrategy, ParallelStrategy):
    """Answers Lightning's questions about ranks where several ranks form one replica.

    Attributes:
        num_pipelines: replicas, of as many ranks each.
        peers: this rank in the other pipelines, once ranks are joined; None if there is one.
    """

    settings: Settings
    num_nodes: int = 1
    _start_method: StartMethod
    _scopes: ExitStack
    _session: Session | None = None
    num_pipelines: int = 1
    peers: Peers | None = None
    skips_step = False
    """Whether the training step that has just run returned None, on all ranks."""

    # Processes --------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if isinstance(self.accelerator, EmulatedAccelerator):
            self.settings = self.accelerator.apply(
                self.settings, num_devices=self.num_processes, num_nodes=self.num_nodes
            )
        choose_port(self.cluster_environment)
        start_method = self._start_method
        is_started = self.cluster_environment.creates_processes_externally
        if start_method == "popen" and self.settings.is_emulated and not is_started:
            # There may be dozens of emulated ranks: they are forked where they can be.
            can_fork = "fork" in multiprocessing.get_all_start_methods()
            start_method = "fork" if can_fork else "popen"
        if start_method == "popen":
            self._launcher = SubprocessScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )
        else:
            if self.num_nodes > 1:
                raise ValueError(
                    f"start_method={start_method!r} starts the processes of one host; on several "
                    'use start_method="popen", torchrun or SLURM'
                )
            self._launcher = ProcessLauncher(self, start_method=start_method)

    def setup_environment(self) -> None:
        """Joins the processes."""
        if self.lightning_module is not None:
            refuse_lost_weights(self.lightning_module)
        super().setup_environment()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        check_pipelines(self.settings, self.num_pipelines, self.num_nodes * self.num_processes)
        # Ranks of a pool may be on devices of several types: gloo is what all of them speak.
        is_mixed = isinstance(self.accelerator, PoolAccelerator)
        backend = "gloo" if is_mixed else device_backend(self.root_device)
        if backend != "gloo":
            backend = f"cpu:gloo,{self.root_device.type}:{backend}"
        has_said_so = self.lightning_module is None or isinstance(self._launcher, ProcessLauncher)
        what, timeout_s = f"Starting {self.world_size} processes", self.settings.timeout_s
        with nullcontext() if has_said_so else waiting_for(what, self._module()):
            timeout = timedelta(seconds=timeout_s)
            init_dist_connection(self.cluster_environment, backend, timeout=timeout)
            if self.num_pipelines > 1:
                self.peers = Peers(self.num_pipelines, timeout_s, self.root_device)
        self._session = session = self._new_session()
        session.on_all_ranks = not isinstance(self._launcher, ProcessLauncher)
        if session.on_all_ranks:
            start = self.node_rank * self.num_processes
            ranks_here = range(start, start + self.num_processes)
            children = getattr(self._launcher, "procs", ())
            session.on_failure = partial(show_once, session.run.failures, ranks_here, children)
        if self.lightning_module is not None:
            loaders = led_loaders(self.lightning_module.trainer, session.run)
            self._scopes.enter_context(loaders)

    def _new_session(self) -> Session:
        """What this rank keeps until the teardown."""
        run = PipelinedRun(self.settings, self.root_device, self.peers, builder=build_pipeline)
        return Session(run)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, such as that of a callback that knows its Trainer, is of no running job."""
        running = dict.fromkeys(("_session", "_hooks", "peers"))
        state = super().__getstate__() | running | {"_scopes": ExitStack()}
        if isinstance(self._launcher, SubprocessScriptLauncher):
            state["_launcher"] = launcher = copy.copy(self._launcher)
            launcher.procs = []
        return state

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

    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    # Agreement -------------------------------------------------------------------------------

    def _open_session(self) -> Session | None:
        """All ranks: the run, while it is under way. After an error it ends here.

        Raises:
            BaseException: the error, where the module is not whole.
        """
        if self._session is None:
            return None
        error = self._session.error_that_ends()
        if error is not None and self._session.lost is not None:
            add_note(error, f"no checkpoint can be written after this error: {self._session.lost}")
            self.teardown()
            raise error
        return None if self._session.is_closed else self._session

    def end_process(self, error: BaseException) -> BaseException | None:
        """This process ends with an error; see :meth:`Session.end_process`."""
        return None if self._session is None else self._session.end_process(error)

    @contextmanager
    def _together(self) -> Iterator[Control | None]:
        """All ranks: messages between those of a run that is under way; None before and after.

        Ends in the first error of any rank.
        """
        session = self._open_session()
        if session is None:
            yield None
            return
        session.run.control.check_together()
        session.run.failures.check()
        with session.run.failures.guard():
            yield session.run.control

    @property
    def user_code_alone(self) -> str | None:
        """Name of the user code that runs on rank 0 and nowhere else; None if there is none."""
        return None if self._session is None else self._session.run.control.alone_in

    @property
    def session(self) -> Session:
        """What this rank keeps from setup to teardown; for this package."""
        assert self._session is not None, "the strategy's environment is not set up"
        return self._session

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for all ranks; refused where only rank 0 is, which might wait for ever."""
        if distributed_is_initialized():
            with self._together() as control:
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
        pipeline, place = divmod(src, dist.get_world_size() // self.num_pipelines)
        if self.user_code_alone is None or place != 0:
            with self._together() as control:
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
        with self._together() as control:
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
        if self.user_code_alone is None:
            has_other = bool(self.total(torch.tensor(int(decision != all))))
            decision = all != has_other  # one other vote decides
        if self.peers is None or self._open_session() is None:
            return decision
        op = dist.ReduceOp.MIN if all else dist.ReduceOp.MAX
        vote = torch.tensor(int(decision))
        return bool(self.peers.reduced(vote, op, "deciding with all pipelines"))
