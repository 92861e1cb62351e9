"""Rank 0 before the pipeline is built: modules in front of the pipelined forward, on its device.

The whole module is on the CPU until it is known which rank holds what, which the first call of the
forward tells. Batches are on rank 0's device by then. So a module that the first step calls before
moves there when it is called, and back before the model is captured.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_gpp.strategy.state.held_elsewhere import lifted


class EarlyModules:
    """Moves what is called of a module to a device, from :meth:`start` to :meth:`stop`.

    Args:
        module: whose sub-modules.
        device: of rank 0.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._members = {id(part) for part in module.modules()}
        self._device = device
        self._moved: list[Tensor] = []
        self._hook: RemovableHandle | None = None

    def start(self) -> None:
        """From now on they move."""
        if self._device.type not in ("cpu", "meta"):
            self._hook = register_module_forward_pre_hook(self._before)

    def stop(self) -> None:
        """They are back on the CPU."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        for tensor in self._moved:
            with torch.inference_mode(False):
                tensor.data = tensor.data.cpu()
        self._moved = []

    def _before(self, module: nn.Module, _: Any) -> None:
        if id(module) not in self._members:
            return
        # Layers may read the weights of modules in them without calling these.
        with lifted(), torch.inference_mode(False):  # moving is no change of the user's
            for tensor in (*module.parameters(), *module.buffers()):
                if tensor.device.type == "cpu":
                    tensor.data = tensor.data.to(self._device)
                    self._moved.append(tensor)
