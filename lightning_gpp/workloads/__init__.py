"""Published workloads: readers of profiles measured by others, and models of papers as data."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from lightning_gpp.workloads.full_graph import FullGraphWorkload, full_graph
from lightning_gpp.workloads.models import candle_uno, dlrm, mmt, transformer
from lightning_gpp.workloads.pipedream_profile import read_pipedream_profile
from lightning_gpp.workloads.piper import (
    PiperEdge,
    PiperInstance,
    PiperOperator,
    Tmpc,
    read_piper_instance,
    read_piper_workload,
)
from lightning_gpp.workloads.workload import Workload

WORKLOADS: Mapping[str, Callable[..., Workload]] = MappingProxyType(
    {
        "mmt": mmt,
        "dlrm": dlrm,
        "candle_uno": candle_uno,
        "transformer": transformer,
        "full_graph": full_graph,
    }
)
"""Models of papers by name; their keyword arguments are the options."""

__all__ = [
    "WORKLOADS",
    "FullGraphWorkload",
    "PiperEdge",
    "PiperInstance",
    "PiperOperator",
    "Tmpc",
    "Workload",
    "candle_uno",
    "dlrm",
    "full_graph",
    "mmt",
    "read_pipedream_profile",
    "read_piper_instance",
    "read_piper_workload",
    "transformer",
]
