"""All private names of Lightning and torch that the strategies use.

A release which moves one is noticed where this file is imported.
"""

import copy
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import distributed as fabric_distributed
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch.callbacks import (
    StochasticWeightAveraging,
    ThroughputMonitor,
    WeightAveraging,
)
from lightning.pytorch.core import optimizer
from lightning.pytorch.loops import fetchers
from lightning.pytorch.overrides import distributed as samplers
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch.strategies import launchers
from lightning.pytorch.utilities import CombinedLoader, exceptions, model_helpers
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torchmetrics import Metric

from lightning_gpp.common.instance_attribute import replaced

DataloaderIter = fetchers._DataFetcherWrapper
IndexBatchSampler = samplers._IndexBatchSamplerWrapper
LightningOptimizer = optimizer.LightningOptimizer
MultiProcessingLauncher = launchers._MultiProcessingLauncher
SIGTERMException = exceptions.SIGTERMException
SubprocessScriptLauncher = launchers._SubprocessScriptLauncher
distributed_is_initialized = fabric_distributed._distributed_is_initialized
do_nothing_closure = optimizer.do_nothing_closure
init_dist_connection = fabric_distributed._init_dist_connection
is_overridden = model_helpers.is_overridden

PORTS = range(25_000, 32_768)
"""Below those that systems give to connections, above Lightning's for SLURM."""


def choose_port(environment: object) -> None:
    """Ranks of one host meet at a port that no connection is given before rank 0 listens there.

    Lightning would take one of those that connections are given, unless the user names one.
    """
    is_free = isinstance(environment, LightningEnvironment) and environment._main_port == -1
    while is_free and not {"MASTER_PORT", "STANDALONE_PORT"} & os.environ.keys():
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            environment._main_port = port  # type: ignore[attr-defined]
            return


def averages_kept_by(callbacks: Iterable[pl.Callback]) -> list[nn.Module]:
    """The copies of the module in which callbacks average weights."""
    averaging = (WeightAveraging, StochasticWeightAveraging)
    found = (each._average_model for each in callbacks if isinstance(each, averaging))
    return [average for average in found if average is not None]


def loaders_of_loops(trainer: pl.Trainer) -> list[CombinedLoader | None]:
    """The data loaders of a Trainer's loops that are set up."""
    fit = trainer.fit_loop
    evaluation = (fit.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop)
    return [loop._combined_loader for loop in (fit, *evaluation, trainer.predict_loop)]


def keep_results(trainer: pl.Trainer) -> Callable[[], None]:
    """Keeps what ``self.log`` has been given in this loop so far; to be called to put it back."""
    results = trainer._results
    assert results is not None, "no loop runs"
    before = {key: copy.copy(value) for key, value in results.items()}

    def put_back() -> None:
        results.clear()
        results.update(before)

    return put_back


def throughputs_of(monitor: ThroughputMonitor) -> list[Throughput]:
    """The throughput monitors of a callback, one for each kind of step."""
    return list(monitor._throughputs.values())


@contextmanager
def signals_answered_by_all(trainer: pl.Trainer, terminate: Callable[[], None]) -> Iterator[None]:
    """In this signals that come to single ranks are answered by all of them.

    Args:
        trainer: which would answer each signal on the rank that it comes to, where it comes.
        terminate: answers SIGTERM.
    """
    connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    environment = trainer._accelerator_connector.cluster_environment
    places: list[tuple[Any, str, Any]] = [
        (vars(connector), "_sigterm_notifier_fn", lambda signum, frame: terminate()),
        # Called before every training step.
        (vars(loop), "_broadcast_sigterm_tensor", lambda: None),
    ]
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        requeue = _Requeue(trainer, environment.requeue_signal or signal.SIGUSR1)
        places.append((vars(connector), "_slurm_sigusr_handler_fn", requeue.receive))
        places.append((vars(loop), "_broadcast_sigterm_tensor", requeue))
    with replaced(places):
        yield


class _Requeue:
    """Has all ranks save, and rank 0 requeue a SLURM job, before the same training step.

    SLURM sends its signal to every process, which gets it at a place of its own: the n-th signals
    of all ranks are one request.
    """

    def __init__(self, trainer: pl.Trainer, signum: signal.Signals) -> None:
        self._trainer, self._signum = trainer, signum
        self._save_and_requeue = trainer._signal_connector._slurm_sigusr_handler_fn
        self._received = self._served = 0

    def receive(self, signum: int, frame: FrameType) -> None:
        """In the midst of anything: as little as possible."""
        self._received += 1

    def __call__(self) -> None:
        strategy, is_asked = self._trainer.strategy, self._received > self._served
        if strategy.reduce_boolean_decision(is_asked, all=False):
            self._served += 1
            self._save_and_requeue(self._signum, sys._getframe())


@contextmanager
def when_batch_ends(trainer: pl.Trainer, call: Callable[[], None]) -> Iterator[None]:
    """In this calls it when a batch has been trained on and counted, and its hooks have run."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    count = progress.increment_completed

    def counted() -> None:
        count()
        call()

    with replaced([(vars(progress), "increment_completed", counted)]):
        yield


def receive_sigterm(trainer: pl.Trainer) -> None:
    """Lightning ends the run at the end of this step."""
    trainer._signal_connector.received_sigterm = True


def tell_device(module: nn.Module, device: torch.device) -> None:
    """Sets ``self.device`` of a module whose parameters were moved one by one, and of its metrics.

    Args:
        module: the LightningModule of this rank.
        device: where this rank's stages run.
    """
    for part in module.modules():
        if isinstance(part, Metric):
            part.to(device)
        elif isinstance(part, _DeviceDtypeModuleMixin):
            part._device = device


def keeps_graph() -> bool:
    """Inside of a backward: whether it was asked to keep the graph (``retain_graph=True``)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def will_reach(leaf: Tensor) -> bool:
    """Inside of a backward: whether it goes on to accumulate the gradient of a leaf.

    ``backward()`` does, ``torch.autograd.grad`` for other tensors does not.
    """
    return bool(torch._C._will_engine_execute_node(get_gradient_edge(leaf).node))


def innermost_function_mode() -> TorchFunctionMode | None:
    """The mode that sees calls of torch first; None where there is none."""
    count = torch._C._len_torch_function_stack()
    return torch._C._get_function_stack_at(count - 1) if count else None


def when_backward_ends(call: Callable[[], None]) -> None:
    """Inside of a backward: calls this when all of it is done."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def foreach_norm(tensors: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The 2-norm of every tensor, accumulated in ``dtype``; few kernels for all of them.

    ``torch.nn.utils.get_total_norm`` calls it, too, but accumulates in the tensors' own dtype.
    """
    return torch._foreach_norm(tensors, 2, dtype=dtype)
