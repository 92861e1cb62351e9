"""Modules whose parameters have no values (``meta`` tensors) say so before they are used.

An earlier run may have lost them with a rank that held them, or they were made on that device, from
which nothing could be trained on one device either.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from torch import nn

from lightning_gpp.common.tensor_places import has_meta, own_places

_lost: WeakSet[nn.Module] = WeakSet()
"""Parts that a run has left with meta tensors."""


def note_lost_weights(module: nn.Module) -> None:
    """Remembers which parts of a module were left with meta tensors; they refuse to be read."""
    for part in module.modules():
        if has_meta(part) and part not in _lost:
            part.register_state_dict_pre_hook(_refuse)  # type: ignore[no-untyped-call]
            part.register_forward_pre_hook(_refuse)
            _lost.add(part)


def _refuse(part: nn.Module, *_: Any) -> None:
    if has_meta(part):  # a checkpoint may have been loaded with assign=True
        refuse_without_values(part)


def refuse_without_values(module: nn.Module) -> None:
    """Refuses a module that lacks values.

    Raises:
        RuntimeError: names the first parameter or buffer, and says what to do.
    """
    for path, part in module.named_modules():
        for place in own_places(part, path):
            if place.tensor.is_meta:
                why = (
                    "an earlier run ended in an error of a rank that held them. Build the module "
                    "anew, and load the last checkpoint (load_from_checkpoint, or a new module and "
                    "ckpt_path=...)"
                    if part in _lost
                    else "they are on the meta device. Make the layers in configure_model, without "
                    'torch.device("meta"): no process gets the memory of all then, either'
                )
                raise RuntimeError(
                    f"{type(module).__name__} lacks values of parameters or buffers, "
                    f"{place.name!r} first: {why}"
                )
