"""Inputs that repeat in every call are sent once and kept by the stages that read them.

The edges of a full graph or a table of positions are arguments of every call of the forward, and
mostly the same ones. The rank that feeds the pipeline keeps a copy of what it has sent last and
compares it, bit by bit, with what it is to send: what is the same is left out of the message, and
the receiver takes what it has kept. So nothing is assumed; an input that does change is sent again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightning_gpp.common.host_copies import to_host
from lightning_gpp.common.tensor_places import bits_of, num_changes
from lightning_gpp.runtime.payload import Payload


@dataclass(slots=True)
class StayingInputs:
    """The repeated inputs that one rank has sent and received.

    Sender and receiver agree without asking each other, as messages between two stages come in the
    order in which they are sent.

    Attributes:
        names: inputs that are worth comparing (:attr:`.graph.ModelGraph.staying`).
        sent: (rank, stage, input) -> number of the content that is there.
        kept: (stage, input) -> what has come.
    """

    names: frozenset[str] = frozenset()
    sent: dict[tuple[int, int, str], int] = field(default_factory=dict)
    kept: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    _contents: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    """Input -> number of its changes, and a copy of what it held last."""
    _compared: dict[tuple[object, ...], int] = field(default_factory=dict)

    def begin(self) -> None:
        """A run of a program begins: nothing is compared yet."""
        self._compared.clear()

    def thinned(self, payload: Payload, names: Sequence[str], rank: int, stage: int) -> Payload:
        """A message without the inputs that are already there.

        Args:
            payload: holds an input per name.
            names: of the inputs.
            rank: that it goes to.
            stage: of the plan, there.
        """
        if payload.structure is not None or self.names.isdisjoint(names):
            return payload
        tensors = list(payload.tensors)
        looked_at = {
            index: (name, tensor)
            for index, (name, tensor) in enumerate(zip(names, payload.tensors, strict=True))
            if tensor is not None and self._may_stay(name, payload.requires_grad[index])
        }
        numbers = self._numbers(list(looked_at.values()))
        for (index, (name, _)), number in zip(looked_at.items(), numbers, strict=True):
            if self.sent.get((rank, stage, name)) == number:
                tensors[index] = None
            self.sent[rank, stage, name] = number
        return replace(payload, tensors=tensors)

    def filled(self, payload: Payload, names: Sequence[str], stage: int) -> Payload:
        """A message with the inputs that were left out.

        Args:
            payload: as it came.
            names: of the inputs in it.
            stage: of the plan, that reads them.
        """
        if payload.structure is not None or self.names.isdisjoint(names):
            return payload
        tensors = list(payload.settle().tensors)
        for index, (name, tensor) in enumerate(zip(names, payload.tensors, strict=True)):
            if self._may_stay(name, payload.requires_grad[index]):
                if tensor is not None:
                    self.kept[stage, name] = _copy(tensor)
                tensors[index] = self.kept[stage, name]
        return replace(payload, tensors=tensors)

    def _may_stay(self, name: str, requires_grad: bool) -> bool:
        return name in self.names and not requires_grad

    def _numbers(self, inputs: Sequence[tuple[str, Tensor]]) -> list[int]:
        """The numbers of their contents; in one run a tensor is looked at once, all together."""
        keys = [(n, t.data_ptr(), num_changes(t), t.shape, t.stride()) for n, t in inputs]
        new = {k: each for k, each in zip(keys, inputs, strict=True) if k not in self._compared}
        flags = to_host(self._is_last(name, tensor) for name, tensor in new.values())
        for (key, (name, tensor)), is_last in zip(new.items(), flags, strict=True):
            if not is_last:
                number = self._contents[name][0] + 1 if name in self._contents else 0
                self._contents[name] = number, _copy(tensor)
            self._compared[key] = self._contents[name][0]
        return [self._compared[key] for key in keys]

    def _is_last(self, name: str, tensor: Tensor) -> Tensor:
        """Whether an input holds the same bits as last, as a flag on its device."""
        if name not in self._contents:
            return torch.tensor(False)
        copy = self._contents[name][1]
        alike = (copy.shape, copy.dtype, copy.device) == (tensor.shape, tensor.dtype, tensor.device)
        if not alike or copy.is_meta:  # without numbers
            return torch.tensor(alike)
        return (bits_of(copy) == bits_of(tensor)).all()


def _copy(tensor: Tensor) -> Tensor:
    """A copy for later runs, whichever mode this one is in."""
    with torch.inference_mode(False), torch.no_grad():
        return tensor.detach().clone()
