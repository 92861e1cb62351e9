"""Caches profiles by everything that they depend on.

A profile belongs to a model (graph, code and settings of its modules, shapes and types of a
micro-batch, mode), a device, and the versions of what measured it. Whatever of these differs makes
another key.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable
from typing import Any

import torch

from lightning_gpp import _version
from lightning_gpp.capture import CapturedModel, module_content
from lightning_gpp.common.document_cache import DocumentCache, content_hash, folder_of
from lightning_gpp.common.torch_device import device_name
from lightning_gpp.common.units_of_measure import number_text
from lightning_gpp.cost import Costs, costs_from_json, costs_to_json
from lightning_gpp.graph import graph_to_json
from lightning_gpp.strategy.settings import CacheLike

log = logging.getLogger(__name__)

OF_EARLIER_RUN = "The profile is of an earlier run"

BUSY = 1.5
"""Times as long as the measuring thread computed, which never sleeps: less than two thirds of a
processor were left for it. Operators look slower then than they are, and nothing else shows it."""


def profiled(
    given: CacheLike, captured: CapturedModel, device: torch.device, measure: Callable[[], Costs]
) -> tuple[Costs, tuple[str, ...]]:
    """The costs of a model on a device, with notes: of an earlier run, or of a busy machine.

    Args:
        given: True for the default folder, False to make everything anew and keep nothing, or a
            folder.
        captured: the model.
        device: where it was captured.
        measure: makes a profile.
    """
    folder = folder_of(given)
    documents, key = DocumentCache(folder), {} if folder is None else profile_key(captured, device)
    if (found := documents.read("profile", key, costs_from_json)) is not None:
        note = (
            f"{OF_EARLIER_RUN}: {found[1]}; delete the file, or use "
            "GraphPipeStrategy(cache=False), to make it anew."
        )
        log.debug("%s", note)
        return found[0], (note,)
    start_s, computed_s = time.perf_counter(), time.thread_time()
    costs = measure()
    took_s, computed_s = time.perf_counter() - start_s, time.thread_time() - computed_s
    slowness = took_s / computed_s if device.type == "cpu" and computed_s else 1.0
    if slowness <= BUSY:
        documents.write("profile", key, costs_to_json(costs))
        return costs, ()
    note = (
        "This machine was busy: measuring the model took "
        f"{number_text(round(slowness, 1))} times as long as it computed, so "
        "predictions may be too long. A later run measures again."
    )
    return costs, (note,)


def profile_key(captured: CapturedModel, device: torch.device) -> dict[str, Any]:
    """The cache key of a profile: everything that it depends on."""
    kind = device.type
    return {
        "graph": content_hash(graph_to_json(captured.graph)),
        "capture": captured.fingerprint,
        "module": module_content(captured.module),
        "is_training": captured.module.training,
        "device": device_name(device),
        # what makes two devices of one kind different
        "machine": [platform.node(), os.cpu_count(), torch.get_num_threads()]
        if device.type == "cpu"
        else [],
        # settings of torch on which the speed of an operator depends
        "autocast": str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "",
        "default_dtype": str(torch.get_default_dtype()),
        "float32_matmul": torch.get_float32_matmul_precision(),
        "is_deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "versions": _versions(),
    }


def _versions() -> list[str]:
    toolkit = torch.version.cuda or torch.version.hip or torch.version.xpu or ""
    python = platform.python_version()
    return [_version.__version__, python, torch.__version__, toolkit]
