"""The Lightning glue: the strategy and its registration."""

from lightning_gpp.strategy import other_root
from lightning_gpp.strategy.graphpipe import START_METHODS, GraphPipeStrategy
from lightning_gpp.strategy.one_device import single_device
from lightning_gpp.strategy.timeline_callback import TimelineCallback

other_root.install()

__all__ = ["START_METHODS", "GraphPipeStrategy", "TimelineCallback", "single_device"]
