"""Profiles and refits of earlier runs, found again by content.

A profile belongs to a model (graph, code and settings of its modules, shapes and types of a
micro-batch, mode), a device, and the versions of what measured it. Whatever of these differs makes
another key.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lightning_gpp import _version
from lightning_gpp.capture import CapturedModel, module_content
from lightning_gpp.common.document_cache import DocumentCache, content_hash, default_folder
from lightning_gpp.common.torch_device import device_name
from lightning_gpp.common.units_of_measure import number_text
from lightning_gpp.cost import Costs, costs_from_json, costs_to_json
from lightning_gpp.graph import graph_to_json
from lightning_gpp.simulate.refit import Refit
from lightning_gpp.strategy.settings import CacheLike

log = logging.getLogger(__name__)

OF_EARLIER_RUN = "The profile is of an earlier run"

BUSY = 1.5
"""Times as long as the measuring thread computed, which never sleeps: less than two thirds of a
processor were left for it. Operators look slower then than they are, and nothing else shows it."""

_of_busy_machine: dict[tuple[Path | None, str], Costs] = {}
"""Measured by this process, and not kept: later loops of a Trainer plan with the same."""

_PROFILE_ROOMS = ("capture", "cost", "graph")
_REFIT_ROOMS = (*_PROFILE_ROOMS, "planner", "schedule", "simulate")


class ProfileCache:
    """Makes profiles, or finds those of an earlier run.

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
        if (found := self._documents.read("profile", key, costs_from_json)) is not None:
            note = (
                f"{OF_EARLIER_RUN}: {found[1]}; delete the file, or use "
                "GraphPipeStrategy(cache=False), to make it anew."
            )
            log.debug("%s", note)
            return found[0], (note,)
        place = folder, content_hash(key)
        if place in _of_busy_machine:
            return _of_busy_machine[place], ()
        start_s, computed_s = time.perf_counter(), time.thread_time()
        costs = measure()
        took_s, computed_s = time.perf_counter() - start_s, time.thread_time() - computed_s
        slowness = took_s / computed_s if device.type == "cpu" and computed_s else 1.0
        if slowness <= BUSY:
            self._documents.write("profile", key, costs_to_json(costs))
            return costs, ()
        if folder is not None:
            _of_busy_machine[place] = costs
        note = (
            "This machine was busy: measuring the model took "
            f"{number_text(round(slowness, 1))} times as long as it computed, so "
            "predictions may be too long. A later run measures again."
        )
        return costs, (note,)

    def refit(self, key: Mapping[str, Any]) -> Refit | None:
        """The refit that was kept last under a :func:`refit_key`; None where there is none."""
        found = self._documents.read("refit", key, Refit.from_json)
        return None if found is None else found[0]

    def keep_refit(self, key: Mapping[str, Any], found: Refit) -> None:
        """Keeps a refit in the place of the last one."""
        self._documents.write("refit", key, found.to_json())


def profile_key(captured: CapturedModel, device: torch.device) -> dict[str, Any]:
    """What a profile depends on."""
    kind = device.type
    return {
        "graph": content_hash(graph_to_json(captured.graph)),
        "capture": captured.fingerprint,
        "module": module_content(captured.module),
        "is_training": captured.module.training,
        "device": device_name(device),
        # what makes two devices of one kind different
        "machine": [_processor_name(), os.cpu_count(), torch.get_num_threads()]
        if device.type == "cpu"
        else [],
        # settings of torch on which the speed of an operator depends
        "autocast": str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "",
        "default_dtype": str(torch.get_default_dtype()),
        "float32_matmul": torch.get_float32_matmul_precision(),
        "is_deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "versions": _versions(_PROFILE_ROOMS),
    }


def refit_key(captured: CapturedModel, device: torch.device) -> dict[str, Any]:
    """What a refit belongs to: what its profile depends on, but for the samples of a micro-batch.

    A refit knows with how many samples it was recorded, and schedules have micro-batches of other
    sizes. The module must be whole: its content is part of the key. The device is that of rank 0.
    """
    graph = captured.graph
    inputs = [
        (given.value.name, spec.dtype, dim, spec.shape[:dim], spec.shape[dim:][dim is not None :])
        for given in graph.inputs
        for spec in given.value.tensors
        for dim in [spec.batch_dim]
    ]
    names = [operator.name for operator in graph]
    return profile_key(captured, device) | {
        "graph": content_hash(repr((inputs, names, graph.parameters))),
        "versions": _versions(_REFIT_ROOMS),
    }


@cache
def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else f"{platform.machine()} {platform.processor()}"


def _versions(rooms: tuple[str, ...]) -> list[str]:
    toolkit = torch.version.cuda or torch.version.hip or torch.version.xpu or ""
    python = platform.python_version()
    return [_version.__version__, _code_hash(rooms), python, torch.__version__, toolkit]


@cache
def _code_hash(rooms: tuple[str, ...]) -> str:
    """Hash of the package's own files: the version alone does not tell two checkouts apart."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for room in rooms:
        for path in sorted((root / room).rglob("*.py")):
            digest.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:32]
