"""Loads the stand-in when torch is imported.

The library registers hooks that torch asks for once, on its first question about accelerators,
which is within ``import torch``. So the library comes before it, and the patches of ``torch.cuda``
after it. Imports the standard library only.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

LIBRARIES = "LIGHTNING_GPP_STANDIN_LIBRARIES"
"""Environment variable: the folder with the built libraries."""


def at_import_of_torch() -> None:
    """Makes ``import torch`` bring the stand-in with it."""
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already; the stand-in for GPUs has to come before it")
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds torch once, with a loader around its own."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads the library, torch, and the patches of torch."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        torch_libraries = Path(module.__spec__.origin).parent / "lib"
        for name in ("libc10.so", "libtorch_cpu.so"):
            ctypes.CDLL(str(torch_libraries / name), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(Path(os.environ[LIBRARIES]) / "libstandin.so"), ctypes.RTLD_GLOBAL)
        self._loader.exec_module(module)
        from standin_gpus import patches

        patches.apply()
