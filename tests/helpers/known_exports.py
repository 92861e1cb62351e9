"""Exports of modules, made once per process for all that are built alike.

An export follows from a module's classes, attributes and modes and from the form of the call. It
takes half of the time of a small training by an SPMD program; a table of cases trains the same few
modules again and again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as lp
import pytest
from torch import Tensor, nn

from lightning_gpp.capture.tracing.reads import Read, watched_reads
from lightning_gpp.spmd.run import export
from lightning_gpp.strategy.spmd import spmd_calls
from lightning_gpp.strategy.spmd.spmd_calls import call_key

_known: dict[Hashable, tuple[export.ExportedForward, list[Read]]] = {}


@contextmanager
def exports_once() -> Iterator[None]:
    """Forwards of SPMD programs are exported once per way that their modules are built."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spmd_calls, "export_forward", _export_forward)
        yield


def _export_forward(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> export.ExportedForward:
    try:
        key = (_built(module), call_key(module, args, kwargs))
    except _NotPlainError:
        return export.export_forward(module, args, kwargs)
    if key not in _known:
        with watched_reads(module) as reads:
            exported = export.export_forward(module, args, kwargs)
        _known[key] = exported, reads
    exported, reads = _known[key]
    for read in reads:  # whoever watches sees them, too
        getattr(module.get_submodule(read.path), read.name)
    constants = {name: tensor.clone() for name, tensor in exported.constants.items()}
    return dataclasses.replace(exported, constants=constants)


class _NotPlainError(Exception):
    """An attribute's value tells nothing of what it does (a function, for example)."""


def _built(module: nn.Module) -> Hashable:
    """All that a forward may depend on: classes, plain attributes, sizes of parameters, hooks."""
    return tuple(
        (name, type(part), *_attributes(part))
        for name, part in module.named_modules(remove_duplicate=False)
        if not type(part).__module__.startswith("torchmetrics.")
    )


def _attributes(part: nn.Module) -> Iterator[Hashable]:
    ours = _OF_LIGHTNING if isinstance(part, lp.LightningModule) else {}
    return ((key, _plain(value)) for key, value in vars(part).items() if key not in ours)


_OF_LIGHTNING = {*dir(lp.LightningModule()), *vars(lp.LightningModule())} - {*vars(nn.Module())}
"""What the Trainer keeps in a module, and methods that are taken over while it runs."""


def _plain(value: Any) -> Hashable:
    match value:
        case None | bool() | int() | float() | str() | type():
            return value
        case Tensor():
            numbers = () if isinstance(value, nn.Parameter) else (value.tolist(),)
            return tuple(value.shape), value.dtype, value.requires_grad, repr(numbers)
        case nn.Module():
            return type(value)
        case dict():
            return tuple((key, _plain(each)) for key, each in value.items())
        case tuple() | list() | set():
            return tuple(map(_plain, value))
    raise _NotPlainError
