"""From an unmodified module to a graph of operators and runnable stages."""

from lightning_gpp.capture.attempts import capture
from lightning_gpp.capture.blocks import Block, BlockGraph
from lightning_gpp.capture.errors import CaptureError
from lightning_gpp.capture.model import CapturedModel
from lightning_gpp.capture.module_content import module_content
from lightning_gpp.capture.profiling.profiler import device_kind, profile, profile_costs
from lightning_gpp.capture.stage import StageModule
from lightning_gpp.capture.values.placed import placed

__all__ = [
    "Block",
    "BlockGraph",
    "CaptureError",
    "CapturedModel",
    "StageModule",
    "capture",
    "device_kind",
    "module_content",
    "placed",
    "profile",
    "profile_costs",
]
