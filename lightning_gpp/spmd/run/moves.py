"""What moves when a tensor changes its placement; without autograd, on one device of all.

Of a tensor's values ``R`` and ``R=`` are alike. A gradient lies as the dual of its value. So the
backward of ``source -> target`` is the move ``target.dual -> source.dual``, and there is nothing
more to know: what is gathered forwards is reduced and scattered backwards, what is cut is padded,
what is summed is left as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gpp.spmd.placement import PARTIAL, R_SUMMED, Placement
from lightning_gpp.spmd.program import Conversion, Method, ReceiveInput, ReturnOutput
from lightning_gpp.spmd.run.collectives import Collectives, Shape
from lightning_gpp.spmd.run.shards import Shards


@dataclass(frozen=True, slots=True)
class Mover:
    """Moves tensors between the placements of a program, on one device.

    Attributes:
        collectives: of this device with the others.
        shards: how tensors are dealt.
    """

    collectives: Collectives
    shards: Shards

    def move(
        self,
        tensor: Tensor,
        whole: Shape,
        source: Placement,
        target: Placement,
        method: Method,
        purpose: str,
    ) -> Tensor:
        """This device's part of a tensor in another placement.

        Args:
            tensor: its part now.
            whole: sizes of the whole tensor.
            source: the placement it has.
            target: the one it is to have.
            method: how.
            purpose: what for, for errors.
        """
        is_grouped = method is Method.GROUPED
        rank, shards, group = self.collectives.rank, self.shards, self.collectives
        if source == target or (source.is_replicated and target.is_replicated):
            return tensor
        if source.is_replicated and target.is_shard:
            return shards.cut(tensor, target, rank)
        if source.is_replicated:  # one device's summand is all of it
            return tensor if rank == 0 else torch.zeros_like(tensor)
        if source.is_shard and target.is_replicated:
            shapes = shards.shapes(whole, source)
            parts = group.all_gather(tensor, shapes, is_grouped=is_grouped, purpose=purpose)
            return shards.join(parts, source)
        if source.is_shard and target.is_shard:
            return self._reshard(tensor, whole, source, target, is_grouped, purpose)
        if source.is_shard:
            return shards.pad(tensor, whole, source, rank)
        if target.is_shard:
            parts = shards.cut_all(tensor, target)
            return group.reduce_scatter(parts, is_grouped=is_grouped, purpose=purpose)
        if method is Method.SCATTER_GATHER:
            return self._in_two(tensor, purpose)
        return group.all_reduce(tensor, purpose=purpose)

    def _reshard(
        self,
        tensor: Tensor,
        whole: Shape,
        source: Placement,
        target: Placement,
        is_grouped: bool,
        purpose: str,
    ) -> Tensor:
        """From one shard to another: of one dimension dealt otherwise, or of two dimensions."""
        shards, rank = self.shards, self.collectives.rank
        if source.dim != target.dim:
            parts = shards.cut_all(tensor, target)
            shapes = [shards.shape(shape, target, rank) for shape in shards.shapes(whole, source)]
            found = self.collectives.all_to_all(
                parts, shapes, is_grouped=is_grouped, purpose=purpose
            )
            return shards.join(found, source)
        dim, length = source.dim, whole[source.dim or 0]
        assert dim is not None
        here = [_rows(shards, source, length, device) for device in range(shards.num_devices)]
        there = [_rows(shards, target, length, device) for device in range(shards.num_devices)]
        own = {int(row): place for place, row in enumerate(here[rank])}
        parts = [
            tensor.index_select(dim, _index([own[row] for row in rows if row in own], tensor))
            for rows in there
        ]
        wanted = set(there[rank])
        from_each = [[row for row in rows if row in wanted] for rows in here]
        shapes = [(*whole[:dim], len(rows), *whole[dim + 1 :]) for rows in from_each]
        found = self.collectives.all_to_all(parts, shapes, is_grouped=is_grouped, purpose=purpose)
        place = {row: at for at, row in enumerate(row for rows in from_each for row in rows)}
        return torch.cat(found, dim).index_select(
            dim, _index([place[row] for row in there[rank]], tensor)
        )

    def _in_two(self, tensor: Tensor, purpose: str) -> Tensor:
        """A sum as reduce-scatter and all-gather, every device adding up an equal part."""
        flat = tensor.reshape(-1)
        parts = list(torch.tensor_split(flat, self.collectives.num_ranks))
        own = self.collectives.reduce_scatter(parts, is_grouped=False, purpose=purpose)
        shapes = [tuple(part.shape) for part in parts]
        found = self.collectives.all_gather(own, shapes, is_grouped=False, purpose=purpose)
        return torch.cat(found).reshape(tensor.shape)

    def from_root(
        self,
        tensor: Tensor | None,
        whole: Shape,
        dtype: torch.dtype,
        target: Placement,
        purpose: str,
    ) -> Tensor:
        """This device's part of a tensor that rank 0 gives whole: a broadcast or a scatter."""
        if not target.is_shard:
            return self.collectives.broadcast(tensor, whole, dtype, purpose=purpose)
        parts = None if tensor is None else self.shards.cut_all(tensor, target)
        shapes = self.shards.shapes(whole, target)
        return self.collectives.scatter(parts, shapes, dtype, purpose=purpose)

    def to_root(
        self, tensor: Tensor, whole: Shape, source: Placement, purpose: str
    ) -> Tensor | None:
        """On rank 0 the whole tensor, None elsewhere: its own, a gather or a sum."""
        if source.is_shard:
            shapes = self.shards.shapes(whole, source)
            parts = self.collectives.gather(tensor, shapes, purpose=purpose)
            return None if parts is None else self.shards.join(parts, source)
        if source == PARTIAL:
            return self.collectives.reduce(tensor, purpose=purpose)
        return tensor if self.collectives.rank == 0 else None

    # What a program's instructions move, and their gradients ---------------------------------

    def convert(self, part: Tensor, whole: Shape, conversion: Conversion) -> Tensor:
        """This device's part of a value in another placement."""
        source, target = conversion.source, conversion.target
        what = f"{conversion.value} {source} -> {target}"
        return self.move(part, whole, source, target, conversion.method, what)

    def convert_back(self, gradient: Tensor, whole: Shape, conversion: Conversion) -> Tensor:
        """The gradient of the value that was converted."""
        source, target = conversion.source, conversion.target
        method = conversion.backward_method
        what = f"gradient of {conversion.value} {source} -> {target}"
        return self.move(gradient, whole, target.dual, source.dual, method, what)

    def receive(
        self, given: Tensor | None, whole: Shape, dtype: torch.dtype, instruction: ReceiveInput
    ) -> Tensor:
        """This device's part of an argument of the forward, which rank 0 gives."""
        what = f"argument {instruction.value}, {instruction.placement}"
        return self.from_root(given, whole, dtype, instruction.placement, what)

    def receive_back(
        self, gradient: Tensor, whole: Shape, instruction: ReceiveInput
    ) -> Tensor | None:
        """On rank 0 the gradient of an argument."""
        what = f"gradient of argument {instruction.value}, {instruction.placement}"
        return self.to_root(gradient, whole, instruction.placement.dual, what)

    def give(self, part: Tensor, whole: Shape, instruction: ReturnOutput) -> Tensor | None:
        """On rank 0 a result of the forward."""
        source = instruction.placement
        return self.to_root(part, whole, source, f"result {instruction.value}, {source}")

    def give_back(
        self,
        gradient: Tensor | None,
        whole: Shape,
        dtype: torch.dtype,
        device: torch.device,
        instruction: ReturnOutput,
    ) -> Tensor:
        """This device's part of a result's gradient, which rank 0 gives.

        Rank 0 has it whole, a summand of ``R``, with zeros elsewhere.
        """
        source = instruction.placement
        if source == R_SUMMED:
            is_root = self.collectives.rank == 0
            zeros = torch.zeros(whole, dtype=dtype, device=device)
            return gradient if is_root and gradient is not None else zeros
        what = f"gradient of result {instruction.value}, {source}"
        return self.from_root(gradient, whole, dtype, source.dual, what)


def _rows(shards: Shards, placement: Placement, length: int, device: int) -> list[int]:
    """Which elements of a dimension a device has, in its order."""
    part = shards.cut(torch.arange(length), _in_front(placement), device)
    return [int(row) for row in part]


def _in_front(placement: Placement) -> Placement:
    return Placement(placement.kind, 0, placement.units, placement.outer)


def _index(rows: list[int], like: Tensor) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=like.device)
