"""Initializes modules that were made on the ``meta`` device.

One device cannot train such a module, so there are no numbers to be equal to. The rule is that of
FSDP: every module that has such parameters or buffers itself draws them with its
``reset_parameters``, here in the order of ``modules()``, so that the numbers follow from the seed
whatever the stages. They lie in files until stages take them. A module that makes its layers in
``configure_model`` has the numbers of one device.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from lightning_gpp.common.mapped_tensor import empty_mapped
from lightning_gpp.common.tensor_places import exchange_tensors, has_meta, own_places


def give_values(module: nn.Module) -> None:
    """Draws what has no values; nothing where all has.

    Raises:
        TypeError: a module does not know how.
    """
    lacking = [(path, part) for path, part in module.named_modules() if has_meta(part)]
    for path, part in lacking:
        if not callable(getattr(part, "reset_parameters", None)):
            name = f"{type(part).__name__} ({path!r})" if path else type(part).__name__
            raise TypeError(
                f"{name} has parameters or buffers on the meta device, but no reset_parameters() "
                "to initialize them. Write one, or make the layers in configure_model without "
                'torch.device("meta"); no process then holds all of them either'
            )
    exchange_tensors(
        module, lambda old: empty_mapped(tuple(old.shape), old.dtype) if old.is_meta else None
    )
    with torch.no_grad():
        for _, part in lacking:
            part.reset_parameters()


_lost: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""Parts that were left with meta tensors, and why."""


def note_lost_weights(module: nn.Module, why: str) -> None:
    """Remembers which parts of a module were left with meta tensors; they refuse to be read.

    Args:
        module: of a run that is over.
        why: there is no way to make it whole.
    """
    for part in module.modules():
        if has_meta(part) and part not in _lost:
            part.register_state_dict_pre_hook(_refuse)  # type: ignore[no-untyped-call]
            part.register_forward_pre_hook(_refuse)
            _lost[part] = why


def _refuse(part: nn.Module, *_: Any) -> None:
    if has_meta(part):  # a checkpoint may have been loaded with assign=True
        raise RuntimeError(_text(type(part).__name__, part, ""))


def refuse_lost_weights(module: nn.Module) -> None:
    """Refuses a module of which an earlier run lost weights.

    Raises:
        RuntimeError: names the first of them.
    """
    for path, part in module.named_modules():
        if part in _lost and has_meta(part):
            raise RuntimeError(_text(type(module).__name__, part, path))


def _text(name: str, part: nn.Module, path: str) -> str:
    lost = next(place.name for place in own_places(part, path) if place.tensor.is_meta)
    why = f" ({_lost[part]})" if part in _lost else ""
    return (
        f"{name} has lost values of parameters or buffers, such as {lost!r}: an earlier run ended "
        f"with the failure of a rank that held them{why}. Build the module anew, and load the last "
        "checkpoint (load_from_checkpoint, or a new module and ckpt_path=...)"
    )
