"""Arguments on another device, and operators that visit one.

A model is captured on the CPU, where every rank can hold it and all ranks must see the same graph.
Measuring an operator on a GPU takes copies of its parameters there for as long as it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpp.capture.values.structure import flatten
from lightning_gpp.tensor_places import TensorPlace, tensor_places


def placed(value: Any, device: torch.device) -> Any:
    """A nested container with its tensors on a device; leaves that want gradients stay leaves."""
    leaves, structure = flatten(value)
    return structure.unflatten([_placed(leaf, device) for leaf in leaves])


def _placed(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, Tensor) or leaf.device == device:
        return leaf
    return leaf.detach().to(device).requires_grad_(leaf.requires_grad)


class Visits:
    """Takes parameters and buffers of a module to a device and back.

    Args:
        module: whose.
        device: where to.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._device = module, device
        self._places: dict[int, list[TensorPlace]] = {}
        for place in tensor_places(module):
            self._places.setdefault(id(place.tensor), []).append(place)

    @contextmanager
    def of(self, names: Sequence[str]) -> Iterator[None]:
        """Copies on the device stand in for some parameters and buffers while the body runs.

        What happens to the copies is forgotten: gradients, running statistics.

        Args:
            names: qualified names of them, one for each.
        """
        tensors = [_tensor(self._module, name) for name in names]
        away = [tensor for tensor in tensors if tensor.device != self._device]
        try:
            for tensor in away:
                self._put(tensor, _copy(tensor, self._device))
            yield
        finally:
            for tensor in away:
                self._put(tensor, tensor)

    def _put(self, original: Tensor, tensor: Tensor) -> None:
        for place in self._places[id(original)]:
            place.put(tensor)


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    copy = tensor.detach().to(device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copy, requires_grad=tensor.requires_grad)
    return copy


def _tensor(module: nn.Module, name: str) -> Tensor:
    path, _, key = name.rpartition(".")
    owner = module.get_submodule(path)
    found = (owner._parameters if key in owner._parameters else owner._buffers)[key]
    assert found is not None
    return found
