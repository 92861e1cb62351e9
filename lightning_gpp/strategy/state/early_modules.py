"""Before the pipeline is built: what hooks and the first step use of the module, on its device.

The whole module is on the CPU until it is known which rank holds what, which the first call of the
forward tells. Batches are on rank 0's device by then, and ``self.device`` says a device on all
ranks (the summary of a model calls it there). So a module that is called before, or a parameter
that is read, moves there, and back before the model is captured. The pipelined module itself, and
what it is part of, only have their forward called, and stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_gpp.common.tensor_places import tensor_places
from lightning_gpp.strategy.lightning_private import tell_device
from lightning_gpp.strategy.state.held_elsewhere import lifted


class EarlyModules:
    """Moves what is used of a module to a device, from :meth:`start` to :meth:`stop`.

    Args:
        module: the whole LightningModule.
        target: the module in it whose forward is pipelined.
        device: of this rank.
    """

    def __init__(self, module: nn.Module, target: nn.Module, device: torch.device) -> None:
        self._module, self._device = module, device
        self._around = {part for part in module.modules() if target in part.modules()}
        self._read = nn.Module.__getattr__
        self._ids: set[int] = set()
        self._moved: list[tuple[Tensor, Tensor]] = []
        self._hook: RemovableHandle | None = None

    def start(self) -> None:
        """From now on it moves, and ``self.device`` is that device."""
        if self._device.type == "cpu":
            return
        tell_device(self._module, self._device)
        self._members = set(self._module.modules()) - self._around
        self._ids = {id(place.tensor) for place in tensor_places(self._module)}
        self._hook = register_module_forward_pre_hook(self._before)
        read = self._read = nn.Module.__getattr__

        def moving(module: nn.Module, name: str) -> Any:
            value: Any = read(module, name)
            if id(value) in self._ids:
                self._move([value])
            return value

        nn.Module.__getattr__ = moving  # type: ignore[method-assign]

    def stop(self) -> None:
        """All is back on the CPU."""
        if self._hook is None:
            return
        self._hook.remove()
        nn.Module.__getattr__ = self._read  # type: ignore[method-assign]
        with lifted(), torch.inference_mode(False), torch.no_grad():
            for tensor, before in self._moved:
                tensor.data = before.copy_(tensor.data)
        torch.clear_autocast_cache()  # which has parameters cast where they were
        self._hook, self._ids, self._moved = None, set(), []

    def _before(self, module: nn.Module, _: Any) -> None:
        if module in self._members:
            # Layers may read the weights of modules in them without calling these.
            self._move([*module.parameters(), *module.buffers()])

    def _move(self, tensors: Iterable[Tensor]) -> None:
        with lifted(), torch.inference_mode(False):  # moving is no change of the user's
            for tensor in tensors:
                if tensor.device.type == "cpu":
                    self._moved.append((tensor, tensor.data))
                    tensor.data = tensor.data.to(self._device)
