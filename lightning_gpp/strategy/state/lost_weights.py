"""Modules that a run left without some of their weights.

After an error the ranks that are left make the module whole. Where one of them is gone, or ranks
had made other numbers of updates, they cannot: then what reads the module says so.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from lightning_gpp.common.tensor_places import has_meta, own_places

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
        f"{name} lacks values of parameters or buffers, {lost!r} first: an earlier run ended in an "
        f"error of a rank that held them{why}. Build the module anew, and load the last checkpoint "
        "(load_from_checkpoint, or a new module and ckpt_path=...)"
    )
