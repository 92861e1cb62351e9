"""Profiles and plans of earlier runs, found again by content.

A profile belongs to a model (graph, code and settings of its modules, shapes and types of a
micro-batch, mode), a device, and the versions of what measured it; a plan to a model graph, costs,
a cluster, the question, and the planners' code. Whatever of these differs makes another key.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from lightning_gpp import _version
from lightning_gpp.capture import CapturedModel, device_kind, module_content
from lightning_gpp.cluster import cluster_to_json
from lightning_gpp.common.document_cache import DocumentCache, content_hash, default_folder
from lightning_gpp.common.strict_json import JsonFormat
from lightning_gpp.common.units_of_measure import number_text
from lightning_gpp.cost import Costs, costs_from_json, costs_to_json
from lightning_gpp.graph import graph_to_json
from lightning_gpp.planner import Plan, PlanRequest, plan_from_json, plan_to_json, validate_plan
from lightning_gpp.reports.plan.verdict import BatchTimes
from lightning_gpp.simulate.refit.refit import Refit

CacheLike = bool | str | Path
"""Whether to keep profiles and plans, or the folder to keep them in."""

log = logging.getLogger(__name__)

OF_EARLIER_RUN = " is of an earlier run"

BUSY = 1.5
"""Times as long as the measuring thread computed, which never sleeps: less than two thirds of a
processor were left for it. Operators look slower then than they are, and nothing else shows it."""

BATCHES = JsonFormat("lightning_gpp.batch_times", 2)

T = TypeVar("T")

_of_busy_machine: dict[tuple[Path, str], Costs] = {}
"""Measured by this process, and not kept: later loops of a Trainer plan with the same."""

_PROFILE_ROOMS = ("capture", "cost", "graph")
_REFIT_ROOMS = (*_PROFILE_ROOMS, "planner", "schedule", "simulate")
_PLAN_ROOMS = ("graph", "cluster", "cost", "schedule", "planner")


class PlanCache:
    """Makes profiles and plans, or finds those of an earlier run.

    Args:
        given: True for the default folder, False to make everything anew and keep nothing, or a
            folder.
    """

    def __init__(self, given: CacheLike) -> None:
        folder = default_folder() if given is True else Path(given) if given else None
        self._documents = DocumentCache(folder)

    def costs(
        self, captured: CapturedModel, device: torch.device, measure: Callable[[], Costs]
    ) -> tuple[Costs, tuple[str, ...]]:
        """The costs of a model on a device, with notes: of an earlier run, or of a busy machine."""
        folder = self._documents.folder
        key = {} if folder is None else profile_key(captured, device)
        found = self._found("profile", key, costs_from_json)
        if found is not None:
            return found
        place = folder and (folder, content_hash(key))
        if place in _of_busy_machine:
            return _of_busy_machine[place], ()
        start_s, computed_s = time.perf_counter(), time.thread_time()
        costs = measure()
        took_s, computed_s = time.perf_counter() - start_s, time.thread_time() - computed_s
        slowness = took_s / computed_s if device.type == "cpu" and computed_s else 1.0
        if slowness <= BUSY:
            self._documents.write("profile", key, costs_to_json(costs))
            return costs, ()
        if place is not None:
            _of_busy_machine[place] = costs
        note = (
            "This machine was busy: measuring the model took "
            f"{number_text(round(slowness, 1))} times as long as it computed, so "
            "predictions may be too long. A later run measures again."
        )
        return costs, (note,)

    def plan(
        self, request: PlanRequest, planner: str, search: Callable[[], Plan]
    ) -> tuple[Plan, tuple[str, ...]]:
        """The plan that answers a request, and a note where it is of an earlier run."""

        def valid(text: str) -> Plan:
            plan = plan_from_json(text)
            validate_plan(plan, request.graph, request.num_devices)
            return plan

        key = {} if self._documents.folder is None else plan_key(request, planner)
        found = self._found("plan", key, valid)
        if found is None:
            found = search(), ()
            self._documents.write("plan", key, plan_to_json(found[0]))
        return found

    def refit(self, key: Mapping[str, Any]) -> Refit | None:
        """The refit that was kept last under a :func:`refit_key`; None where there is none."""
        found = self._documents.read("refit", key, Refit.from_json)
        return None if found is None else found[0]

    def keep_refit(self, key: Mapping[str, Any], found: Refit) -> None:
        """Keeps a refit in the place of the last one."""
        self._documents.write("refit", key, found.to_json())

    def batch_times(self, key: Mapping[str, Any]) -> BatchTimes | None:
        """What batches took when the plan of a :func:`plan_run_key` ran last; None: not known."""
        found = self._documents.read("batch_times", key, partial(BATCHES.loads, BatchTimes))
        return None if found is None else found[0]

    def keep_batch_times(self, key: Mapping[str, Any], times: BatchTimes) -> None:
        """Keeps what batches took in the place of what is known."""
        self._documents.write("batch_times", key, BATCHES.dumps(times))

    def _found(
        self, kind: str, key: dict[str, Any], parse: Callable[[str], T]
    ) -> tuple[T, tuple[str, ...]] | None:
        """What an earlier run made, and a note that says so."""
        found = self._documents.read(kind, key, parse)
        if found is None:
            return None
        note = (
            f"The {kind}{OF_EARLIER_RUN}: {found[1]}; delete the file, or use "
            "GraphPipeStrategy(cache=False), to make it anew."
        )
        log.debug("%s", note)
        return found[0], (note,)


def plan_run_key(plan: Plan, request: PlanRequest, refit_key: Mapping[str, Any]) -> dict[str, Any]:
    """What the time of a batch depends on: the plan, its schedule, and what a refit belongs to."""
    return {
        "plan": content_hash(plan_to_json(plan)),
        "schedule": request.schedule,
        "minibatch_size": request.minibatch_size,
        "cluster": content_hash(cluster_to_json(request.cluster)),
        "run": content_hash(dict(refit_key)),
    }


def is_of_earlier_run(note: str) -> bool:
    """Whether a note says that something was found again, and nothing more."""
    return OF_EARLIER_RUN in note.partition(":")[0]


def profile_key(captured: CapturedModel, device: torch.device) -> dict[str, Any]:
    """What a profile depends on."""
    return {
        "graph": content_hash(graph_to_json(captured.graph)),
        "capture": captured.fingerprint,
        "module": module_content(captured.module),
        "is_training": captured.module.training,
        "device": device_kind(device),
        "machine": _machine(device),
        "precision": _precision(device),
        "versions": _versions(_PROFILE_ROOMS),
    }


def refit_key(captured: CapturedModel, device: torch.device) -> dict[str, Any]:
    """What a refit belongs to: what its profile depends on, but for the samples of a micro-batch.

    A refit knows with how many samples it was recorded, and schedules have micro-batches of other
    sizes. The module must be whole: its content is part of the key. The device is that of rank 0.
    """
    graph = captured.graph
    inputs = [
        (given.value.name, spec.dtype, spec.batch_dim, _without(spec.shape, spec.batch_dim))
        for given in graph.inputs
        for spec in given.value.tensors
    ]
    names = [operator.name for operator in graph]
    return profile_key(captured, device) | {
        "graph": content_hash(repr((inputs, names, graph.parameters))),
        "versions": _versions(_REFIT_ROOMS),
    }


def _without(shape: tuple[int, ...], dim: int | None) -> tuple[int, ...]:
    return shape if dim is None else (*shape[:dim], *shape[dim + 1 :])


def plan_key(request: PlanRequest, planner: str) -> dict[str, Any]:
    """What a plan depends on."""
    large = ("graph", "cluster", "costs")
    options = {f.name: getattr(request, f.name) for f in fields(request) if f.name not in large}
    return {
        "graph": content_hash(graph_to_json(request.graph)),
        "cluster": content_hash(cluster_to_json(request.cluster)),
        "costs": content_hash(costs_to_json(request.costs)),
        "planner": planner,
        "options": options,
        "versions": _versions(_PLAN_ROOMS),
    }


def _machine(device: torch.device) -> dict[str, Any]:
    """What makes two devices of one kind different: on a CPU, the processor and its threads."""
    if device.type != "cpu":
        return {}
    return {
        "processor": _processor_name(),
        "num_cores": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
    }


@cache
def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else f"{platform.machine()} {platform.processor()}"


def _precision(device: torch.device) -> dict[str, Any]:
    """Settings of torch on which the speed of an operator depends."""
    kind = "cpu" if device.type == "meta" else device.type
    return {
        "autocast": str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "",
        "default_dtype": str(torch.get_default_dtype()),
        "float32_matmul": torch.get_float32_matmul_precision(),
        "is_deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
    }


def _versions(rooms: tuple[str, ...]) -> dict[str, str]:
    return {
        "lightning_gpp": _version.__version__,
        "code": _code_hash(rooms),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "toolkit": torch.version.cuda or torch.version.hip or torch.version.xpu or "",
    }


@cache
def _code_hash(rooms: tuple[str, ...]) -> str:
    """Hash of the package's own files: the version alone does not tell two checkouts apart."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for room in rooms:
        for path in sorted((root / room).rglob("*.py")):
            digest.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:32]
