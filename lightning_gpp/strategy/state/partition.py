"""Which rank holds which parameters and buffers; makes the module partial or whole.

While the pipeline runs, a rank holds the parameters and buffers of its own stages; the others are
tensors on the ``meta`` device, so that names, shapes and keys stay complete. What no stage reads
(a temperature in the loss, a metric's buffers) belongs to rank 0, where the user's step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpp.common.mapped_tensor import in_memory, in_pieces, is_mapped, mapped
from lightning_gpp.common.tensor_places import TensorPlace, tensor_places
from lightning_gpp.common.torch_device import free_bytes, is_accelerator
from lightning_gpp.strategy.ranks.control import Control


class Partition:
    """The module on this rank; partial while the pipeline runs.

    Args:
        module: the whole LightningModule.
        readers: name of a parameter or buffer (any of its names) -> ranks whose stages read it.
        control: how to reach the other ranks.
        device: where this rank's stages run.

    Attributes:
        control: likewise.
        device: likewise.
        rank: this rank.
        holders: first name of a tensor of the module -> ranks that hold it, ascending; the value
            of the first one counts.
        read: first names of what a stage reads; the others are rank 0's.
    """

    def __init__(
        self,
        module: nn.Module,
        readers: Mapping[str, Iterable[int]],
        control: Control,
        device: torch.device,
    ) -> None:
        self.module, self.rank = module, control.rank
        self.control, self.device = control, device
        places: dict[int, list[TensorPlace]] = {}
        for place in tensor_places(module):
            places.setdefault(id(place.tensor), []).append(place)
        self._places = {of_one[0].name: of_one for of_one in places.values()}
        reading = self._by_first_name(readers)
        self.holders = {name: reading.get(name, (0,)) for name in self._places}
        self.read = {*reading}
        self._held = [name for name, ranks in self.holders.items() if self.rank in ranks]
        self._counted = [name for name, ranks in self.holders.items() if self.rank == ranks[0]]
        self._in_files = any(is_mapped(self._tensor(name)) for name in self._places)

    def _first_names(self) -> dict[str, str]:
        """Every name that a tensor has in the module -> its first one."""
        first = {id(self._tensor(name)): name for name in self._places}
        places = tensor_places(self.module, remove_duplicate=False)
        return {place.name: first[id(place.tensor)] for place in places}

    def _by_first_name(self, readers: Mapping[str, Iterable[int]]) -> dict[str, tuple[int, ...]]:
        """Ranks that read each tensor, by its first name, of what is read."""
        first, ranks = self._first_names(), dict[str, set[int]]()
        for name, reading in readers.items():
            ranks.setdefault(first[name], set()).update(reading)
        return {name: tuple(sorted(found)) for name, found in ranks.items() if found}

    def of_copy(self, module: nn.Module) -> Partition:
        """The same ranks hold the same names of a copy of the module, where it is."""
        device = next((parameter.device for parameter in module.parameters()), self.device)
        return Partition(module, self.holders, self.control, device)

    def move(self, device: torch.device) -> None:
        """Moves what this rank holds."""
        for name in self._held:
            _move(self._tensor(name), device)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """All ranks: the module is whole on rank 0 while the body runs."""
        self.make_whole(self.whole_values())
        yield
        self.make_partial()

    def reunite(self, *, on_all_ranks: bool) -> None:
        """All ranks: the module is whole again on rank 0, or everywhere."""
        self.make_whole(self.whole_values())
        values = self._of_leader("waiting for the weights", every=True) if on_all_ranks else ()
        for name, value in values:
            self.make_whole({name: self.stores(value)})

    def read_all(self, *, on_all_ranks: bool) -> None:
        """All ranks: the same for user code that reads weights, which finds them on the device.

        Where that has no room for them, they are in host memory.
        """
        self.reunite(on_all_ranks=on_all_ranks)
        if not is_accelerator(self.device):
            return
        away = [name for name in self._places if self._tensor(name).device.type == "cpu"]
        free = free_bytes(self.device)
        if free is not None and sum(self._tensor(name).nbytes for name in away) > free / 2:
            return
        for name in away:
            self._replace(name, self._tensor(name).detach().to(self.device))

    def spread(self) -> None:
        """Makes the module partial: rank 0's values go to who holds them, the rest to ``meta``."""
        for name, value in self._of_leader("waiting for the initial weights of rank 0"):
            self._fill(name, value)
        for name in self._held:
            self._keep(name)
        Partition.make_partial(self)

    def _of_leader(self, purpose: str, *, every: bool = False) -> Iterator[tuple[str, Tensor]]:
        """All ranks: on other ranks than 0 its values of what they hold, or of everything."""
        control = self.control
        wanted = {
            rank: [name for name, ranks in self.holders.items() if every or rank in ranks]
            for rank in range(1, control.num_ranks)
        }
        if not control.is_leader:
            left = wanted[self.rank]
            while left:
                values = control.receive_from(0, purpose)
                yield from zip(left, values)
                left = left[len(values) :]
                del values
                control.send_to(0, None)
            return
        for rank, names in wanted.items():
            tensors = [self._tensor(name).detach() for name in names]
            for piece in in_pieces(tensor.nbytes for tensor in tensors):
                control.send_to(rank, tensors[piece])
                control.receive_from(rank, purpose)  # one rank has a few at a time in its memory

    def _keep(self, name: str) -> None:
        """What this rank holds goes onto its device."""
        tensor = self._tensor(name)
        _move(tensor, self.device)
        if is_mapped(tensor):
            tensor.data = in_memory(tensor.data)

    def holders_of_all_names(self) -> dict[str, tuple[int, ...]]:
        """Ranks that hold each parameter and buffer, by every name that it has in the module."""
        return {name: self.holders[first] for name, first in self._first_names().items()}

    def also_read(self, readers: Mapping[str, Iterable[int]]) -> None:
        """Stages of another pipeline read parameters and buffers, too, where they are.

        All ranks that hold a parameter have to read it, as they sum its gradients.

        Args:
            readers: name of a parameter or buffer -> ranks whose stages read it.

        Raises:
            ValueError: they do not, or a rank reads what it does not hold.
        """
        for name, reading in self._by_first_name(readers).items():
            holding = self.holders[name]
            is_parameter = isinstance(self._tensor(name), nn.Parameter)
            if {*reading} - {*holding} or (is_parameter and reading != holding):
                raise ValueError(
                    "forward was called with arguments of another form. In this form ranks "
                    f"{[*reading]} read {name!r}, but ranks {[*holding]} hold it. Call it alike in "
                    "all steps, or pipeline a sub-module by GraphPipeStrategy(module=...)."
                )
            self.read.add(name)

    def whole_values(self) -> dict[str, Tensor]:
        """All ranks: on rank 0 the CPU values of what it does not hold, elsewhere nothing."""
        names = () if self.control.is_leader else self._counted
        own = {name: self._tensor(name).detach().cpu() for name in names}
        return self.control.collect(own, "gathering the weights on rank 0", self.stores)

    def counted_state_dict(self) -> dict[str, Any]:
        """Entries of the module's state dict that count on this rank: over all ranks, each once."""
        counted = {id(self._tensor(name)) for name in self._counted}
        elsewhere = {id(self._tensor(name)) for name in self._places} - counted
        return {
            name: value.detach() if isinstance(value, Tensor) else value
            for name, value in self.module.state_dict(keep_vars=True).items()
            if id(value) in counted or (self.control.is_leader and id(value) not in elsewhere)
        }

    @property
    def stores(self) -> Callable[[Tensor], Tensor]:
        """Where tensors that belong to those of other ranks lie: in files or in memory."""
        return mapped if self._in_files else lambda tensor: tensor

    def make_whole(self, values: Mapping[str, Tensor]) -> None:
        """Puts given values where this rank holds none; user code may have put its own there."""
        held = set(self._held)
        for name, value in values.items():
            if self._tensor(name).is_meta or name not in held:
                self._replace(name, value)

    def make_partial(self) -> None:
        """Undoes :meth:`make_whole`."""
        for name in self._places.keys() - set(self._held):
            self._replace(name, torch.empty_like(self._tensor(name), device="meta"))

    @property
    def is_partial(self) -> bool:
        """Whether other ranks hold something that this one does not."""
        return len(self._held) < len(self.holders)

    def stage_parameters(self) -> list[nn.Parameter]:
        """Parameters that this rank's stages read, each once."""
        return self._parameters(name for name in self._held if name in self.read)

    def held_parameters(self) -> list[nn.Parameter]:
        """Parameters that this rank holds, each once."""
        return self._parameters(self._held)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that an optimizer has of the module, each once."""
        return self.module.named_parameters()

    def parts_in_place(self) -> AbstractContextManager[None]:
        """The module has what optimizers know while the body runs: it always has."""
        return nullcontext()

    def held_values(self, among: Collection[str] | None = None) -> list[Tensor]:
        """Parameters and buffers that this rank holds, each once, in an order that all know.

        Args:
            among: names to look for; None for all.
        """
        return [self._tensor(name) for name in self._held if among is None or name in among]

    def held_with_others(self) -> dict[str, nn.Parameter]:
        """Parameters that this rank and others hold, by name."""
        tensors = {n: self._tensor(n) for n in self._held if len(self.holders[n]) > 1}
        return {name: each for name, each in tensors.items() if isinstance(each, nn.Parameter)}

    def counted_parameters(self) -> list[nn.Parameter]:
        """Parameters that count on this rank: over all ranks, each once."""
        return self._parameters(self._counted)

    def _parameters(self, names: Iterable[str]) -> list[nn.Parameter]:
        tensors = map(self.stored, names)
        return [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]

    def stored(self, name: str) -> Tensor:
        """This rank's copy of a parameter or buffer."""
        return self._tensor(name)

    def _tensor(self, name: str) -> Tensor:
        return self._places[name][0].tensor

    def _fill(self, name: str, value: Tensor) -> None:
        tensor = self._tensor(name)
        if tensor.shape != value.shape or tensor.dtype != value.dtype:
            raise ValueError(
                f"{name!r} is {tuple(tensor.shape)} {tensor.dtype} on rank {self.rank} but "
                f"{tuple(value.shape)} {value.dtype} on rank 0; all ranks must build the same model"
            )
        with torch.no_grad():
            tensor.copy_(value)

    def _replace(self, name: str, value: Tensor) -> None:
        old = self._tensor(name)
        new = value
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(value, requires_grad=old.requires_grad)
        for place in self._places[name]:
            place.put(new)


def _move(tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        tensor.data = tensor.data.to(device)
