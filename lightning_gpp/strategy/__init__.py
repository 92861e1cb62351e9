"""The Lightning glue: the strategy and its registration."""

from lightning_gpp.strategy import other_root
from lightning_gpp.strategy.devices.emulated import EmulatedAccelerator
from lightning_gpp.strategy.devices.pool import PoolAccelerator
from lightning_gpp.strategy.graphpipe import START_METHODS, GraphPipeStrategy
from lightning_gpp.strategy.one_device import single_device
from lightning_gpp.strategy.recording.timeline_callback import TimelineCallback

other_root.install()

ACCELERATORS = {kind.name(): kind for kind in (EmulatedAccelerator, PoolAccelerator)}
"""Accelerators by their name in Lightning's registry."""

__all__ = [
    "ACCELERATORS",
    "START_METHODS",
    "EmulatedAccelerator",
    "GraphPipeStrategy",
    "PoolAccelerator",
    "TimelineCallback",
    "single_device",
]
