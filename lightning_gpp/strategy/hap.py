"""The strategy for devices of unequal speed: ``Trainer(strategy="hap", devices=N)``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import MixedPrecision

from lightning_gpp.common.checks import is_number
from lightning_gpp.schedule import GPIPE
from lightning_gpp.spmd.placement import check_shares
from lightning_gpp.spmd.program import SpmdProgram
from lightning_gpp.strategy.base import BaseStrategy
from lightning_gpp.strategy.devices.accelerators import EmulatedAccelerator
from lightning_gpp.strategy.devices.devices_at_hand import ClusterLike
from lightning_gpp.strategy.pipelined_run import PipelinedRun
from lightning_gpp.strategy.ranks.pipelines import StartMethod
from lightning_gpp.strategy.recording.timeline_callback import TimelineCallback
from lightning_gpp.strategy.session import Session
from lightning_gpp.strategy.settings import (
    CacheLike,
    Refused,
    Settings,
    check_name,
    refuse_callbacks,
)
from lightning_gpp.strategy.spmd.planners import ProgramPlanner
from lightning_gpp.strategy.spmd.spmd_calls import NO_AUTOCAST, SpmdCalls
from lightning_gpp.strategy.spmd.spmd_model import ProgramPackage, SpmdModel

PROGRAM_PLANNERS = ("hap", "data_parallel")
"""Planners of SPMD programs by name; they are made for the devices of a run."""

_REFUSED: Refused = {
    TimelineCallback: "records the actions of a pipeline, which an SPMD program does not have; "
    "take it out of callbacks",
    ModelPruning: "replaces parameters, of which ranks of an SPMD program hold parts; prune the "
    "trained module after the fit (torch.nn.utils.prune)",
    **dict.fromkeys(
        (WeightAveraging, StochasticWeightAveraging),
        "averages whole weights, of which ranks of an SPMD program hold parts; use "
        "strategy='graphpipe', or average the weights of several checkpoints after training",
    ),
}


class HAPStrategy(BaseStrategy):
    """Trains an unmodified LightningModule with every operator divided over all devices (HAP).

    The forward is captured as ATen operators, and a program says what every device does with which
    part of which tensor, and when parts are exchanged (HAP, EuroSys 2024, arXiv 2401.05965). The
    user's step runs once per batch on rank 0 and sees the outputs of the whole batch, so losses,
    logs and metrics are those of one device. Checkpoints are ordinary ones.

    Args:
        shares: each device's part of the work, summing to 1; by default the best for the measured
            speeds.
        planner: ``"hap"``, which searches a program; ``"data_parallel"``, which divides the samples
            by ``shares``, or equally; or a function that returns a program.
        module: as in :class:`~lightning_gpp.GraphPipeStrategy`, like all arguments that follow.

    Raises:
        ValueError: shares are no shares.
    """

    reads_late = False  # what a rank has of a parameter is a part of it

    def __init__(
        self,
        shares: Sequence[float] | None = None,
        *,
        planner: str | ProgramPlanner = "hap",
        module: str | None = None,
        leaf_modules: Sequence[type | str] = (),
        cluster: ClusterLike | None = None,
        cache: CacheLike = True,
        timeout: float = 1800.0,
        start_method: StartMethod = "popen",
        **lightning: Any,
    ) -> None:
        if shares is not None:
            if not isinstance(shares, Sequence) or not all(map(is_number, shares)):
                raise ValueError(f"shares: expected one number per device, got {shares!r}")
            check_shares(shares)
        if isinstance(planner, str):
            check_name("planner", planner, PROGRAM_PLANNERS)
        settings = Settings(
            num_microbatches=1,
            schedule=GPIPE.name,
            module=module,
            leaf_modules=tuple(leaf_modules),
            timeout_s=timeout,
            cluster=cluster,
            cache=cache,
        )
        super().__init__(settings, start_method=start_method, **lightning)
        self.shares, self.program_planner = shares, planner
        self.program: SpmdProgram | None = None

    def _configure_launcher(self) -> None:
        if isinstance(self.accelerator, EmulatedAccelerator):
            raise NotImplementedError(
                "emulated devices run pipelines, not SPMD programs; graphpipe job=plan planner=hap "
                "predicts a program on any cluster"
            )
        num_devices = self.num_nodes * self.num_processes
        if self.shares is not None and len(self.shares) != num_devices:
            raise ValueError(
                f"HAPStrategy(shares={list(self.shares)}) has {len(self.shares)} numbers for "
                f"{num_devices} devices; give one for each"
            )
        super()._configure_launcher()

    def setup(self, trainer: pl.Trainer) -> None:
        """Prepares what does not need data; the model is divided at the first batch.

        Raises:
            NotImplementedError: a callback is about pipelines or whole weights, or the precision is
                mixed.
        """
        refuse_callbacks(trainer, _REFUSED)
        if isinstance(self.precision_plugin, MixedPrecision):
            raise NotImplementedError(NO_AUTOCAST)
        super().setup(trainer)
        calls = self.session.forward
        assert isinstance(calls, SpmdCalls)
        calls.prepare(self.program_planner)

    def _new_session(self) -> Session:
        def build(run: PipelinedRun, package: ProgramPackage | None) -> None:
            calls.build(package)

        run = PipelinedRun(self.settings, self.root_device, builder=build)
        calls = SpmdCalls(run, self.shares)
        return Session(run, calls)

    def _show(self) -> None:
        self.program = self._divided.interpreters[0][0].program

    @property
    def _divided(self) -> SpmdModel:
        model = self.session.run.model
        assert isinstance(model, SpmdModel)
        return model

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Every rank takes the values of what it holds, and its parts of what is divided."""
        super().load_model_state_dict(checkpoint, strict)
        if self._session is not None and self._session.run.model is not None:
            self._divided.partition.load(checkpoint["state_dict"])

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Steps an optimizer on all ranks; what was cleared in the module is cleared."""
        if self.session.run.model is not None:
            self._divided.partition.clear_gradients()
        return super().optimizer_step(*args, **kwargs)
