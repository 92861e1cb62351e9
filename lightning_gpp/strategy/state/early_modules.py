"""Uses of the module before the pipeline is built: moves what they need to the device.

The whole module is on the CPU until it is known which rank holds what, which the first call of the
forward tells. Batches are on rank 0's device by then, and ``self.device`` says a device on all
ranks (the summary of a model calls it there). So a module that is called before, or a parameter
that is read, moves there, and back before the model is captured. The pipelined module itself, and
what it is part of, only have their forward called, and stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from lightning_gpp.common.tensor_places import tensor_places
from lightning_gpp.strategy.lightning_private import tell_device
from lightning_gpp.strategy.state.held_elsewhere import lifted


@contextmanager
def early_modules(module: nn.Module, target: nn.Module, device: torch.device) -> Iterator[None]:
    """In this what is used of a module moves to a device; it is on the CPU again after.

    Args:
        module: the whole LightningModule; its ``self.device`` is that device from now on.
        target: the module in it whose forward is pipelined.
        device: of this rank.
    """
    if device.type == "cpu":
        yield
        return
    tell_device(module, device)
    around = {part for part in module.modules() if target in part.modules()}
    members = set(module.modules()) - around
    ids = {id(place.tensor) for place in tensor_places(module)}
    moved: list[tuple[Tensor, Tensor]] = []
    read = nn.Module.__getattr__

    def move(tensors: Iterable[Tensor]) -> None:
        with lifted(), torch.inference_mode(False):  # moving is no change of the user's
            for tensor in tensors:
                if tensor.device.type == "cpu":
                    moved.append((tensor, tensor.data))
                    tensor.data = tensor.data.to(device)

    def reading(part: nn.Module, name: str) -> Any:
        value: Any = read(part, name)
        if id(value) in ids:
            move([value])
        return value

    def calling(part: nn.Module, _: Any) -> None:
        if part in members:  # layers may read the weights of modules in them without calling these
            move([*part.parameters(), *part.buffers()])

    hook = register_module_forward_pre_hook(calling)
    nn.Module.__getattr__ = reading  # type: ignore[method-assign]
    try:
        yield
    finally:
        hook.remove()
        nn.Module.__getattr__ = read  # type: ignore[method-assign]
        with lifted(), torch.inference_mode(False), torch.no_grad():
            for tensor, before in moved:
                tensor.data = before.copy_(tensor.data)
        torch.clear_autocast_cache()  # which has parameters cast where they were
