"""``ProcessGroupNCCL``: the library's backend, with gloo below it."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.constants
from torch._C import _distributed_c10d as native
from torch.distributed import distributed_c10d as c10d

from standin_gpus.library import FOLDER


class Options:
    """What a group is made with."""

    is_high_priority_stream = False

    def __init__(self) -> None:
        self._timeout = c10d.default_pg_timeout


class _IsNccl(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, native.Backend) and instance.name() == "nccl"


class ProcessGroupNCCL(metaclass=_IsNccl):
    """Makes a backend; the objects are the library's."""

    Options = Options

    def __new__(cls, store: Any, rank: int, size: int, options: Options) -> Any:
        below = native.PrefixStore("gloo", store)
        gloo = native.ProcessGroupGloo(below, rank, size, options._timeout)
        return _library().create(gloo, native.PrefixStore("nccl", store), rank, size)


def apply() -> None:
    """Patches the backend into ``torch.distributed``."""
    c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = ProcessGroupNCCL
    c10d._NCCL_AVAILABLE = True
    torch._C._nccl_version = lambda: 2 << 32 | 27 << 16
    torch._C._nccl_version_suffix = lambda: b""
    c10d._shutdown_backend = lambda group: None
    native._DEFAULT_PG_NCCL_TIMEOUT = c10d.default_pg_timeout
    for module in (c10d, torch.distributed.constants):
        module.default_pg_nccl_timeout = c10d.default_pg_timeout


def _library() -> Any:
    spec = importlib.util.spec_from_file_location("standin_nccl", FOLDER / "standin_nccl.so")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
