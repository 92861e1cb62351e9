"""Registers the strategies and the accelerators with Lightning without importing it.

Lightning loads no third-party plug-ins by itself. ``import lightning_gpp`` calls
:func:`register`; pip installation alone is enough too, through torch's entry-point group
``torch.backends``, whose functions run at ``import torch``. Either way an import hook waits for
Lightning's registries to be imported and then registers names whose factory imports ours lazily.

This module uses the standard library only and must never raise: it would break ``import torch``.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_NAMES: dict[str, dict[str, dict[str, str]]] = {
    "strategies": {
        "graphpipe": {"start_method": "popen"},
        "graphpipe_spawn": {"start_method": "spawn"},
        "graphpipe_fork": {"start_method": "fork"},
        "graphpipe_notebook": {"start_method": "fork"},
        "graphpipe_async": {"start_method": "popen", "schedule": "1f1b-async"},
        "gnnpipe": {"start_method": "popen", "kind": "GNNPipeStrategy"},
        "hap": {"start_method": "popen", "kind": "HAPStrategy"},
    },
    "accelerators": {"emulated": {"kind": "emulated"}, "pool": {"kind": "pool"}},
}
"""Module of Lightning with a registry -> our names in it, with what they are made with."""

_MODULES = tuple(f"lightning.pytorch.{name}" for name in _NAMES)

log = logging.getLogger(__name__)


def register() -> None:
    """Registers now what is imported, and the rest when it is."""
    for name in _MODULES:
        module = sys.modules.get(name)
        spec = getattr(module, "__spec__", None)
        if module is not None and not getattr(spec, "_initializing", False):
            _register(module)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


autoload = register
"""Entry point of the group ``torch.backends``."""


def _register(module: ModuleType) -> None:
    """Puts our names into a registry."""
    room = module.__name__.rpartition(".")[2]
    try:
        is_accelerator = room == "accelerators"
        registry = module.AcceleratorRegistry if is_accelerator else module.StrategyRegistry
        ours = LazyAccelerator if is_accelerator else LazyStrategy
        for name, arguments in _NAMES[room].items():
            if name not in registry:
                registry.register(name, ours, description="lightning_gpp", **arguments)
    except Exception as error:  # must not break `import torch`; the registry then lacks our names
        log.warning("lightning_gpp could not register its plug-ins: %s", error)


class LazyStrategy:
    """Makes one of our strategies when a Trainer asks for it by name."""

    def __new__(cls, *, kind: str = "GraphPipeStrategy", **kwargs: Any) -> Any:
        """Imports the strategy and builds it."""
        from lightning_gpp import strategy

        return getattr(strategy, kind)(**kwargs)


class LazyAccelerator:
    """Makes one of our accelerators when a Trainer asks for it by name."""

    def __new__(cls, *, kind: str) -> Any:
        """Imports the accelerator and builds it."""
        from lightning_gpp.strategy import ACCELERATORS

        return ACCELERATORS[kind]()

    @staticmethod
    def is_available() -> bool:
        """Whether the Trainer may name it as one that is there; all run on a CPU too."""
        return True


class _Finder(importlib.abc.MetaPathFinder):
    """Registers after one of the known modules was executed."""

    def __init__(self) -> None:
        self._looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _MODULES or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            execute = spec.loader.exec_module

            def then_register(module: ModuleType) -> None:
                execute(module)
                _register(module)

            spec.loader.exec_module = then_register  # type: ignore[method-assign]
        return spec
