"""Captures an unmodified module as a graph of operators and runnable stages.

``attempts`` captures a model, and again with modules kept whole that decide for themselves;
``model`` is what comes of it, ``stage`` what runs.

Folders: ``values`` has what goes into a forward and out of it, ``tracing`` ways to trace it,
``operators`` the way from nodes to operators, ``checks`` whether the graph is the module,
``profiling`` what operators cost.
"""

from lightning_gpp.capture.attempts import capture as capture
from lightning_gpp.capture.blocks import Block as Block
from lightning_gpp.capture.blocks import BlockGraph as BlockGraph
from lightning_gpp.capture.errors import CaptureError as CaptureError
from lightning_gpp.capture.model import CapturedModel as CapturedModel
from lightning_gpp.capture.operators.fingerprint import module_content as module_content
from lightning_gpp.capture.profiler import profile_costs as profile_costs
from lightning_gpp.capture.stage import StageModule as StageModule
from lightning_gpp.capture.values.placed import on_host as on_host
from lightning_gpp.capture.values.placed import placed as placed
