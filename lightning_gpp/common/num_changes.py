"""How often a tensor has been changed in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def num_changes(tensor: Tensor) -> int | None:
    """Changes in place so far, of a tensor or of what shares its memory; None if nobody counts.

    >>> import torch
    >>> tensor = torch.zeros(2)
    >>> before = num_changes(tensor)
    >>> tensor[0] = 1
    >>> num_changes(tensor) == before
    False
    """
    return None if tensor.is_inference() else tensor._version
