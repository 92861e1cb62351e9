"""Modules that a run left without some of their weights, as it ended while ranks were apart.

Where user code of rank 0 raises, the ranks still make the module whole. Where a rank fails inside
of its stages or is gone, what it held is lost, and the next run with the module says so.
"""

from __future__ import annotations

from weakref import WeakSet

from torch import nn

from lightning_gpp.tensor_places import has_meta, own_places

_left_partial: WeakSet[nn.Module] = WeakSet()


def note_lost_weights(module: nn.Module) -> None:
    """Remembers which parts of a module were left with meta tensors."""
    _left_partial.update(part for part in module.modules() if has_meta(part))


def refuse_lost_weights(module: nn.Module) -> None:
    """Refuses a module of which an earlier run lost weights.

    Raises:
        RuntimeError: names the first of them.
    """
    lost = [
        place.name
        for path, part in module.named_modules()
        if part in _left_partial
        for place in own_places(part, path)
        if place.tensor.is_meta
    ]
    if lost:
        name = type(module).__name__
        raise RuntimeError(
            f"{name} lacks {len(lost)} parameters or buffers, {lost[0]!r} first: an earlier run "
            "ended in an error of a rank that held them. Build the module anew, and load the last "
            f"checkpoint ({name}.load_from_checkpoint, or a new module and ckpt_path=...)."
        )
