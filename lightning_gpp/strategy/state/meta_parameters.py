"""Modules that were made on the ``meta`` device: parameters without values get their first ones.

One device cannot train such a module, so there are no numbers to be equal to. The rule is that of
FSDP: every module that has such parameters or buffers itself draws them with its
``reset_parameters``, here in the order of ``modules()``, so that the numbers follow from the seed
whatever the stages. They lie in files until stages take them. A module that makes its layers in
``configure_model`` has the numbers of one device.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_gpp.common.mapped_tensor import empty_mapped
from lightning_gpp.common.tensor_places import exchange_tensors, has_meta


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
                f"{name} has parameters or buffers on the meta device and no reset_parameters() "
                "that draws them. Write one, or make the layers in configure_model, without "
                'torch.device("meta"): no process gets the memory of all then, either'
            )
    exchange_tensors(module, _drawn)
    with torch.no_grad():
        for _, part in lacking:
            part.reset_parameters()


def _drawn(tensor: Tensor) -> Tensor | None:
    """Memory for one without values."""
    return empty_mapped(tuple(tensor.shape), tensor.dtype) if tensor.is_meta else None
