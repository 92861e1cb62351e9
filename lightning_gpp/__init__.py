"""Trains unmodified LightningModules split over devices as a graph of pipeline stages.

``import lightning_gpp`` registers the strategies ``graphpipe``, ``graphpipe_spawn``,
``graphpipe_fork``, ``graphpipe_notebook``, ``graphpipe_async``, ``gnnpipe`` and ``hap`` and the
accelerators ``emulated`` and ``pool``; public names load when they are first used, so that planning
needs neither torch nor Lightning.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_gpp._register import register
from lightning_gpp._version import __version__ as __version__

if TYPE_CHECKING:
    from lightning_gpp.capture import Block, BlockGraph, CaptureError
    from lightning_gpp.graph import ModelGraph, StageGraph
    from lightning_gpp.planner import Plan, Stage, make_plan
    from lightning_gpp.schedule import Program, build_program
    from lightning_gpp.strategy import (
        EmulatedAccelerator,
        GNNPipeStrategy,
        GraphPipeStrategy,
        HAPStrategy,
        PoolAccelerator,
        TimelineCallback,
    )
    from lightning_gpp.workloads import read_pipedream_profile, read_piper_workload

_ROOMS = {
    "capture": ("Block", "BlockGraph", "CaptureError"),
    "graph": ("ModelGraph", "StageGraph"),
    "planner": ("Plan", "Stage", "make_plan"),
    "schedule": ("Program", "build_program"),
    "workloads": ("read_pipedream_profile", "read_piper_workload"),
}

__all__ = [
    "Block",
    "BlockGraph",
    "CaptureError",
    "EmulatedAccelerator",
    "GNNPipeStrategy",
    "GraphPipeStrategy",
    "HAPStrategy",
    "ModelGraph",
    "Plan",
    "PoolAccelerator",
    "Program",
    "Stage",
    "StageGraph",
    "TimelineCallback",
    "build_program",
    "make_plan",
    "read_pipedream_profile",
    "read_piper_workload",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = next((room for room, names in _ROOMS.items() if name in names), "strategy")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


register()
