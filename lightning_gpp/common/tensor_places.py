"""Where modules keep their parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A place that holds a parameter or buffer; a tied one has several.

    Attributes:
        table: parameters or buffers of a module.
        key: of the tensor in it.
        name: qualified name of the tensor.
    """

    table: dict[str, Any]
    key: str
    name: str

    @property
    def tensor(self) -> Tensor:
        """The tensor in this place."""
        found: Tensor = self.table[self.key]
        return found

    def put(self, tensor: Tensor) -> None:
        """Puts another one there."""
        self.table[self.key] = tensor


def own_places(module: nn.Module, path: str = "") -> Iterator[TensorPlace]:
    """The places of a module, without those of its sub-modules.

    Args:
        module: whose.
        path: its qualified name.
    """
    tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    for table in tables:
        for key, tensor in table.items():
            if tensor is not None:
                yield TensorPlace(table, key, f"{path}.{key}" if path else key)


def tensor_places(module: nn.Module, *, remove_duplicate: bool = True) -> Iterator[TensorPlace]:
    """The places of a module and its sub-modules.

    Args:
        module: whose.
        remove_duplicate: whether a sub-module that has several names has only the first.
    """
    for path, part in module.named_modules(remove_duplicate=remove_duplicate):
        yield from own_places(part, path)


def memory_of(tensor: Tensor) -> Hashable:
    """Equal exactly for tensors that share memory."""
    is_plain = tensor.layout is torch.strided
    return is_plain, tensor.untyped_storage()._cdata if is_plain else id(tensor)


def num_changes(tensor: Tensor) -> int | None:
    """Changes in place so far, of a tensor or of what shares its memory; None if nobody counts.

    >>> tensor = torch.zeros(2)
    >>> before = num_changes(tensor)
    >>> tensor[0] = 1
    >>> num_changes(tensor) == before
    False
    """
    return None if tensor.is_inference() else tensor._version


def bits_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor: numbers that are equal may differ (a zero's sign), NaN may not."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A view of one number passes for contiguous with any stride; of bytes it may not have one.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def has_meta(module: nn.Module) -> bool:
    """Whether a module itself has a parameter or buffer without values."""
    return any(place.tensor.is_meta for place in own_places(module))


def exchange_tensors(module: nn.Module, other: Callable[[Tensor], Tensor | None]) -> None:
    """Puts others in the place of parameters and buffers; tied ones stay tied.

    Args:
        module: whose.
        other: what comes in the place of a tensor; None leaves it.
    """
    made: dict[int, tuple[Tensor, Tensor | None]] = {}  # with the old one, whose id stays taken
    for place in tensor_places(module):
        old = place.tensor
        if id(old) not in made:
            made[id(old)] = old, _alike(old, other(old))
        new = made[id(old)][1]
        if new is not None:
            place.put(new)


def _alike(old: Tensor, new: Tensor | None) -> Tensor | None:
    """The new tensor is a parameter if the old one is, with what user code noted on that."""
    if new is None or not isinstance(old, nn.Parameter):
        return new
    parameter = nn.Parameter(new, requires_grad=old.requires_grad)
    parameter.__dict__.update(old.__dict__)
    return parameter
