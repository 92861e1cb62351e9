"""Builds the pipeline of a run on all ranks together: capture, costs, plan, stages."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from lightning_gpp.capture import (
    CapturedModel,
    CaptureError,
    capture,
    on_host,
    placed,
    profile_costs,
)
from lightning_gpp.capture.tracing.keep_whole import WholeMethod
from lightning_gpp.common.mapped_tensor import freed_at_once, is_mapped
from lightning_gpp.common.torch_device import room_bytes
from lightning_gpp.common.without_collection import collecting_only_new
from lightning_gpp.cost import Costs
from lightning_gpp.gnn import ChunkedModel, chunk_costs, mixing_methods, without_caches
from lightning_gpp.planner import evaluate_plan
from lightning_gpp.planner.base import DoesNotFitError
from lightning_gpp.planner.plan_to_run import PlanToRun
from lightning_gpp.schedule import ONE_F_ONE_B_ASYNC
from lightning_gpp.strategy.devices.devices_at_hand import DeviceAtHand, cluster_at_hand
from lightning_gpp.strategy.lightning_private import tell_device
from lightning_gpp.strategy.logging.logs import recording
from lightning_gpp.strategy.pipeline import Pipeline
from lightning_gpp.strategy.pipeline_of_plan import pipeline_of_plan
from lightning_gpp.strategy.pipelined_run import PipelinedRun, modes_of
from lightning_gpp.strategy.planning.example import GraphCall, model_in_chunks
from lightning_gpp.strategy.planning.planning import Example, Measured, plan_pipeline
from lightning_gpp.strategy.planning.profile_cache import profiled
from lightning_gpp.strategy.report import tell_of_outside, waiting_for, warn_of_little_room
from lightning_gpp.strategy.settings import fewest_per_update
from lightning_gpp.strategy.state.held_elsewhere import lifted
from lightning_gpp.strategy.state.optimizers import PartialOptimizer

CPU = torch.device("cpu")


def build_pipeline(run: PipelinedRun, example: Example | None) -> None:
    """All ranks: captures the model, agrees on a plan and builds this rank's stages.

    Args:
        run: of this rank, which has the pipeline afterwards.
        example: a micro-batch, known on rank 0.

    Raises:
        RuntimeError: forward logs.
    """
    is_in_files = any(map(is_mapped, run.module.parameters()))
    collecting = freed_at_once() if is_in_files else collecting_only_new()
    with collecting, torch.inference_mode(False):  # what moves would be inference tensors
        run.stop_early_modules()
        if run.module.training:
            run.train_modes = modes_of(run.target)
        logged: list[str] = []
        note = recording(run.module, lambda name, *args, **kwargs: logged.append(name))
        with note, torch.enable_grad(), lifted():
            pipeline = PipelineBuild(run, example).pipeline()
        if logged:
            raise RuntimeError(
                f"forward logs {logged[0]!r}, which a pipelined forward cannot: it is captured "
                "once and runs on several ranks. Return the value and log it in the step."
            )
        take_pipeline(run, pipeline)


def take_pipeline(run: PipelinedRun, pipeline: Pipeline) -> None:
    """All ranks: the pipeline of the first form of call is built; the module becomes partial."""
    changing = [run.settings.prefix + name for name in pipeline.captured.changing]
    run.take(pipeline, PartialOptimizer, changing)


def agreed(run: PipelinedRun, decided: Any, purpose: str) -> Any:
    """All ranks of all pipelines: what rank 0 of the first one has decided.

    Args:
        run: of this rank.
        decided: on that rank.
        purpose: of the waiting, for errors.
    """
    if run.peers is not None and run.control.is_leader:
        decided = run.peers.share(decided, purpose)
    return run.control.share(decided, purpose)


class PipelineBuild:
    """One build of a pipeline: the results of its steps so far.

    Args:
        run: of this rank.
        example: a micro-batch, known on rank 0.
    """

    captured: CapturedModel

    def __init__(self, run: PipelinedRun, example: Example | None) -> None:
        self.run, self.example = run, example
        self.settings, self.control = run.settings, run.control
        self.chunked: ChunkedModel | None = None
        self.planned: PlanToRun | None = None
        self.found: Sequence[DeviceAtHand] = ()
        self.measured: Measured | None = None
        self.rooms: Sequence[int | None] = ()
        """On rank 0 bytes that tensors of each rank may take, once ranks are connected."""

    def pipeline(self) -> Pipeline:
        """This rank's part of the pipeline."""
        run, control, full_graph = self.run, self.control, self.settings.full_graph
        if full_graph is None:
            args, kwargs = self.capture_shared()
        else:
            args, kwargs = self.shared()
            call = GraphCall.of(run.target, args, kwargs)
            with without_caches(run.target):
                self.capture(call.args, call.kwargs, mixing_methods(run.target))
            flags = run.train_modes
            with waiting_for("Dividing the graph into chunks", run.module):
                chunked = model_in_chunks(full_graph, self.captured, call, flags, control)
            self.captured.take_graph(chunked.graph, chunked.in_ways.operators)
            self.chunked = chunked
        self._look(args, kwargs)
        pipeline = self._within_memory(self._by_plan())
        if control.is_leader and control.num_ranks > 1:
            read = [each.name for each in self.captured.graph.parameters]
            tell_of_outside(run.module, run.target, read)
        if self.chunked is not None:  # stages keep what they read of the graph, and no more
            codes = pipeline.executor.stages.values()
            self.chunked.keep_arguments({name for code in codes for name in code.inputs})
        return pipeline

    def shared(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Rank 0's first micro-batch, on the device where this rank captures the model.

        That is the rank's own if it is of rank 0's type: all ranks have to see the same graph. One
        that is divided into chunks is in host memory, and so is the model then.
        """
        run, example = self.run, self.example
        told = None
        if example is not None:
            given = tuple(example.args), dict(example.kwargs)
            staying = [] if run.device.type == "cpu" else on_host(given)  # lengths, for example
            told = placed(given, CPU), run.device.type, staying
        given, leader_type, staying = self.control.share(told, "waiting for the first micro-batch")
        is_alike = run.device.type == leader_type and self.settings.full_graph is None
        device = run.device if is_alike else CPU
        if run.device.type != "cpu":
            tell_device(run.module, device)
        args, kwargs = placed(given, device, staying)
        return tuple(args), dict(kwargs)

    def capture_shared(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """All ranks capture the model with the first micro-batch, or with all; returns that."""
        given = self.shared()
        if not self.capture(*given):
            self.example = self.example and self.example.otherwise
            given = self.shared()
            self.capture(*given)
        return given

    def capture(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        opened: Mapping[str, Sequence[WholeMethod]] = MappingProxyType({}),
    ) -> bool:
        """All ranks capture the model; the others what rank 0 has verified.

        Returns:
            Whether the forward takes these samples, if it may be given others.

        Raises:
            RuntimeError: ranks or pipelines have captured different models.
        """
        run, control, settings = self.run, self.control, self.settings
        verified = None
        if not control.is_leader:
            verified = control.hear("waiting until rank 0 has captured the model")
            if verified is None:
                return False
        with waiting_for("Capturing the model", run.module):
            try:
                self.captured = capture(
                    run.target,
                    args,
                    kwargs,
                    leaf_modules=settings.leaf_modules,
                    blocks=settings.blocks,
                    opened=opened,
                    train_modes=run.train_modes,
                    mode=None if run.forms else True,  # the plan is that of training
                    verified=verified,
                )
            except Exception as error:  # of the user's code
                is_last = self.example is None or self.example.otherwise is None
                if is_last or isinstance(error, CaptureError):
                    raise
                control.tell(None)
                return False
            if control.is_leader:
                control.tell(self.captured.verified)
            own, purpose = self.captured.fingerprint, "comparing the captured models"
            others = control.gather(own, purpose)
            if run.peers is not None and control.is_leader:
                others += run.peers.gather(own, purpose)
            if any(other != own for other in others):
                raise RuntimeError(
                    "not all ranks captured the same model; all must build the same one and take "
                    "the same path through its forward"
                )
        return True

    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """All ranks: what devices there are, and what the model costs on them, if it is not known.

        Pipelines side by side run the plan of the first one, which looks alone.
        """
        run = self.run
        if run.peers is not None and run.peers.pipeline > 0:
            return
        own = DeviceAtHand.of(run.device)
        self.found = self.control.gather(own, "collecting what devices there are")
        if not isinstance(self.settings.costs, Costs):
            with waiting_for("Measuring the model", run.module):
                self.measured = self._measured(args, kwargs, self.found)

    def _by_plan(self) -> Pipeline:
        """All ranks: this rank's part of the pipeline of a plan that is made here."""
        if self.found and self.example is not None:
            # Where nothing fits into what is left, the first plan is tried.
            waiting = waiting_for("Planning", self.run.module)
            with waiting, suppress(*(DoesNotFitError,) if self.rooms else ()):
                self.planned = self._plan(self.example)
        decided = None
        if self.planned is not None:
            decided = self.planned.plan, self.planned.request.schedule
            if self.settings.is_asynchronous:
                # Planned for one mini-batch, or for many in a row, each of them a micro-batch.
                decided = replace(decided[0], num_microbatches=1), ONE_F_ONE_B_ASYNC.name
        plan, schedule = agreed(self.run, decided, "waiting for rank 0's plan")
        return pipeline_of_plan(
            self.run,
            self.captured,
            plan,
            schedule,
            planned=self.planned,
            chunked=self.chunked,
        )

    def _within_memory(self, pipeline: Pipeline) -> Pipeline:
        """All ranks: planned again if connections (NCCL) and other processes left too little."""
        settings, purpose = self.settings, "waiting for rank 0 to look at free memory"
        lacking = self._lacking(pipeline)
        may_change = settings.plan is None and settings.cluster is None
        if agreed(self.run, may_change and len(lacking) > 0, purpose):
            pipeline.close()
            pipeline = self._by_plan()
            lacking = self._lacking(pipeline)
        warn_of_little_room(lacking)
        return pipeline

    def _plan(self, example: Example) -> PlanToRun:
        """Rank 0: the plan."""
        settings, chunked, ways = self.settings, self.chunked, None
        if settings.is_asynchronous:
            settings = replace(settings, per_update=fewest_per_update(self.run.module.trainer))
        if chunked is not None:  # to a planner vertices are samples, chunks micro-batches
            chunks, count = chunked.chunks, len(chunked.chunks)
            settings = replace(settings, num_microbatches=count)
            example = replace(example, minibatch_size=chunks.num_vertices, num_microbatches=count)
            ways = chunked.in_ways if chunks.num_ways > 1 else None
        example = replace(example, inputs_ahead=self.run.inputs_ahead)
        at_hand = cluster_at_hand(self.found, self.rooms)
        return plan_pipeline(settings, self.captured, example, at_hand, self.measured, ways)

    def _lacking(self, pipeline: Pipeline) -> list[tuple[int, int, int]]:
        """All ranks: of those with less memory than the plan needs: rank, bytes needed and there.

        Rank 0 knows it, and has looked at the memory anew.
        """
        purpose = "comparing the plan with free memory"
        self.rooms = self.control.gather(room_bytes(self.run.device), purpose)
        if self.planned is None:
            return []
        devices = evaluate_plan(self.planned.plan, self.planned.request).devices
        found = [(pipeline.rank_of_device[each.device], each.memory_bytes) for each in devices]
        at = ((rank, needed, self.rooms[rank]) for rank, needed in found)
        return [(rank, n, room) for rank, n, room in at if room is not None and n > room]

    def _measured(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], found: Sequence[DeviceAtHand]
    ) -> Measured | None:
        """All ranks: on rank 0 the costs on every kind of device; None elsewhere.

        The first rank of every kind measures on its own device, all at the same time.
        """
        run, control, captured = self.run, self.control, self.captured
        kinds = [each.kind for each in found]
        own: Measured | None = None
        measuring = [kinds.index(kind) for kind in {*kinds}]
        if control.rank in control.share(measuring, "hearing which ranks measure"):
            if all(each.device != run.device for each in captured.inputs(args, kwargs).values()):
                args, kwargs = placed((args, kwargs), run.device)
            if self.chunked is not None:
                costs = chunk_costs(self.chunked, captured.inputs(args, kwargs))
                own = costs, (self.chunked.chunks.describe(),)
            else:
                cache = self.settings.cache
                measure = functools.partial(profile_costs, captured, args, kwargs)
                own = profiled(cache, captured, run.device, measure)
        gathered = control.gather(own, "measuring the model on every kind of device")
        if not gathered:
            return None
        measured, notes = zip(*[each for each in gathered if each is not None], strict=True)
        profiles = tuple(profile for each in measured for profile in each.profiles)
        return Costs(profiles), tuple(dict.fromkeys(itertools.chain(*notes)))
