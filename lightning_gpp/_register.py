"""Registers the strategies and the accelerators with Lightning without importing it.

Lightning loads no third-party plug-ins by itself. ``import lightning_gpp`` calls
:func:`register`; pip installation alone is enough too, through torch's entry-point group
``torch.backends``, whose functions run at ``import torch``. Either way an import hook waits for
Lightning's registries to be imported and then registers names whose factory imports ours lazily.

This module uses the standard library only and must never raise: it would break ``import torch``.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

_ROOT = "lightning.pytorch"
_OTHER_ROOT = "pytorch_lightning"
_STRATEGIES: dict[str, dict[str, str]] = {
    "graphpipe": {"start_method": "popen"},
    "graphpipe_spawn": {"start_method": "spawn"},
    "graphpipe_fork": {"start_method": "fork"},
    "graphpipe_notebook": {"start_method": "fork"},
    "graphpipe_async": {"start_method": "popen", "schedule": "1f1b-async"},
    "gnnpipe": {"start_method": "popen", "kind": "GNNPipeStrategy"},
    "hap": {"start_method": "popen", "kind": "HAPStrategy"},
}

_ACCELERATORS = {
    "emulated": "Devices of a described cluster",
    "pool": "A mixed list of real devices",
}

log = logging.getLogger(__name__)


def autoload() -> None:
    """Entry point of the group ``torch.backends``."""
    register()


def register() -> None:
    """Registers now what is imported, and the rest when it is."""
    try:
        for name, action in _ACTIONS.items():
            if name in sys.modules and not _is_initializing(sys.modules[name]):
                action(sys.modules[name])
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())
    except Exception as error:  # must not break `import torch`; the registry then lacks our names
        log.warning("lightning_gpp could not register its plug-ins: %s", error)


def _register_ours(strategies: ModuleType) -> None:
    registry = strategies.StrategyRegistry
    for name, arguments in _STRATEGIES.items():
        if name not in registry:
            registry.register(
                name,
                LazyStrategy,
                description="Graph pipeline parallelism (lightning_gpp)",
                **arguments,
            )


def _register_accelerators(accelerators: ModuleType) -> None:
    registry = accelerators.AcceleratorRegistry
    for name, description in _ACCELERATORS.items():
        if name not in registry:
            registry.register(name, LazyAccelerator, description=description, kind=name)


def _register_refusal(strategies: ModuleType) -> None:
    _refuse(strategies.StrategyRegistry, _STRATEGIES)


def _register_accelerator_refusal(accelerators: ModuleType) -> None:
    _refuse(accelerators.AcceleratorRegistry, _ACCELERATORS)


def _refuse(registry: Any, names: Iterable[str]) -> None:
    for name in names:
        if name not in registry:
            registry.register(name, OtherRoot, description="lightning_gpp needs lightning.pytorch")


_ACTIONS: dict[str, Callable[[ModuleType], None]] = {
    f"{_ROOT}.accelerators": _register_accelerators,
    f"{_ROOT}.strategies": _register_ours,
    f"{_OTHER_ROOT}.accelerators": _register_accelerator_refusal,
    f"{_OTHER_ROOT}.strategies": _register_refusal,
}


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


class OtherRoot:
    """Refuses Trainers of the other copy of Lightning."""

    def __new__(cls, **kwargs: Any) -> Any:
        """Says what to import instead."""
        raise TypeError(
            "the plug-ins of lightning_gpp (strategy='graphpipe', ...) work with "
            "`lightning.pytorch`; this Trainer is from `pytorch_lightning`, a separate copy whose "
            "classes do not mix with it. Replace `import pytorch_lightning as pl` by `import "
            "lightning.pytorch as pl`."
        )

    @staticmethod
    def is_available() -> bool:
        """Whether the Trainer may name it as one that is there."""
        return False


def _is_initializing(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


class _Finder(importlib.abc.MetaPathFinder):
    """Runs an action after one of the known modules was executed."""

    def __init__(self) -> None:
        self._looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _ACTIONS or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, _ACTIONS[fullname])
        return spec


class _Loader(importlib.abc.Loader):
    """Executes a module with its own loader, then runs an action on it."""

    def __init__(self, loader: Any, action: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._action = action

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        try:
            self._action(module)
        except Exception as error:  # must not break the import of Lightning
            log.warning("lightning_gpp could not register its plug-ins: %s", error)
