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

_HOMES = {
    "Block": "capture",
    "BlockGraph": "capture",
    "CaptureError": "capture",
    "EmulatedAccelerator": "strategy",
    "GNNPipeStrategy": "strategy",
    "GraphPipeStrategy": "strategy",
    "HAPStrategy": "strategy",
    "ModelGraph": "graph",
    "Plan": "planner",
    "PoolAccelerator": "strategy",
    "Program": "schedule",
    "Stage": "planner",
    "StageGraph": "graph",
    "TimelineCallback": "strategy",
    "build_program": "schedule",
    "make_plan": "planner",
    "read_pipedream_profile": "workloads",
    "read_piper_workload": "workloads",
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
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


register()
