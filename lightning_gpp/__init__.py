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
    from lightning_gpp.capture import Block as Block
    from lightning_gpp.capture import BlockGraph as BlockGraph
    from lightning_gpp.capture import CaptureError as CaptureError
    from lightning_gpp.graph import ModelGraph as ModelGraph
    from lightning_gpp.graph import StageGraph as StageGraph
    from lightning_gpp.planner import Plan as Plan
    from lightning_gpp.planner import Stage as Stage
    from lightning_gpp.planner import make_plan as make_plan
    from lightning_gpp.schedule import Program as Program
    from lightning_gpp.schedule import build_program as build_program
    from lightning_gpp.strategy import EmulatedAccelerator as EmulatedAccelerator
    from lightning_gpp.strategy import GNNPipeStrategy as GNNPipeStrategy
    from lightning_gpp.strategy import GraphPipeStrategy as GraphPipeStrategy
    from lightning_gpp.strategy import HAPStrategy as HAPStrategy
    from lightning_gpp.strategy import PoolAccelerator as PoolAccelerator
    from lightning_gpp.strategy import TimelineCallback as TimelineCallback
    from lightning_gpp.workloads import read_pipedream_profile as read_pipedream_profile
    from lightning_gpp.workloads import read_piper_workload as read_piper_workload

_ROOMS = {
    "capture": ("Block", "BlockGraph", "CaptureError"),
    "graph": ("ModelGraph", "StageGraph"),
    "planner": ("Plan", "Stage", "make_plan"),
    "schedule": ("Program", "build_program"),
    "strategy": (
        *("EmulatedAccelerator", "GNNPipeStrategy", "GraphPipeStrategy", "HAPStrategy"),
        *("PoolAccelerator", "TimelineCallback"),
    ),
    "workloads": ("read_pipedream_profile", "read_piper_workload"),
}
__all__ = sorted(name for names in _ROOMS.values() for name in names)


def __getattr__(name: str) -> Any:
    for room, names in _ROOMS.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{room}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


register()
