"""Published workloads: readers of others' profiles, and models of papers as data."""

from collections.abc import Callable

from lightning_gpp.workloads.full_graph import FullGraphWorkload as FullGraphWorkload
from lightning_gpp.workloads.full_graph import full_graph as full_graph
from lightning_gpp.workloads.models import candle_uno as candle_uno
from lightning_gpp.workloads.models import dlrm as dlrm
from lightning_gpp.workloads.models import mmt as mmt
from lightning_gpp.workloads.models import transformer as transformer
from lightning_gpp.workloads.pipedream_profile import (
    read_pipedream_profile as read_pipedream_profile,
)
from lightning_gpp.workloads.piper import read_piper_workload as read_piper_workload
from lightning_gpp.workloads.workload import Workload as Workload

_MODELS: tuple[Callable[..., Workload], ...] = (mmt, dlrm, candle_uno, transformer, full_graph)
WORKLOADS = {model.__name__: model for model in _MODELS}
"""Models of papers by name; their keyword arguments are the options."""
