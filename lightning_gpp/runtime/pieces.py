"""Cutting and joining tensors and payloads where a batch or a micro-batch falls into pieces.

Stages that use micro-batches of different sizes exchange the smaller ones: the stage with the
larger one cuts what it sends and joins what it receives. What is done with a value follows from how
it goes with the samples or vertices.

=============  =======================================  ==========================================
variation      cut                                      join
=============  =======================================  ==========================================
``samples``    along the dimension of the samples       along it
``vertices``   along the dimension of the vertices      along it
``same``       every part gets it; gradients of the     all parts have the same, so the first
               parts are added up                       counts, and gets the whole gradient
``count``      in proportion                            added up
``whole``      refused                                  refused
=============  =======================================  ==========================================
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_gpp.common.host_copies import to_host
from lightning_gpp.graph import Variation
from lightning_gpp.runtime.payload import Payload

Column = Sequence[Tensor | None]

_REMEDY = "give the stages on both sides the same microbatch_multiple and as many devices"


@dataclass(frozen=True, slots=True)
class Slices:
    """Consecutive parts of a tensor.

    Attributes:
        dim: along which it is cut; None where every piece gets all of it.
        lengths: of the parts.
        shifts: what is subtracted from the entries of each part; nothing if there are none.
        overlap: entries that a part shares with the next one.
    """

    dim: int | None
    lengths: tuple[int, ...] = ()
    shifts: tuple[int, ...] = ()
    overlap: int = 0

    @classmethod
    def of_samples(cls, dim: int | None, entries: int, sizes: Sequence[int]) -> Slices:
        """Those of a tensor with so many entries per sample, for pieces of so many samples."""
        return cls(dim) if dim is None else cls(dim, tuple(size * entries for size in sizes))

    def cut(self, tensor: Tensor, num_pieces: int) -> list[Tensor]:
        """The part of every piece."""
        if self.dim is None:
            return [tensor] * num_pieces
        parts, start = [], 0
        for index, length in enumerate(self.lengths):
            part = tensor.narrow(self.dim, start, length + self.overlap)
            parts.append(part - self.shifts[index] if self.shifts else part)
            start += length
        return parts

    def joined(self, parts: Column) -> Tensor | None:
        """The gradient of the whole tensor from those of its parts; zero where a part has none."""
        found = [part for part in parts if part is not None]
        if not found:
            return None
        if self.dim is None:
            return found[0] if len(found) == 1 else torch.stack(found).sum(0)
        before, after = found[0].shape[: self.dim], found[0].shape[self.dim + 1 :]
        whole = [
            found[0].new_zeros(*before, length, *after) if part is None else part
            for part, length in zip(parts, self.lengths, strict=True)
        ]
        return whole[0] if len(whole) == 1 else torch.cat(whole, dim=self.dim)


def cut(tensor: Tensor, sizes: Sequence[int], batch_dim: int | None, name: str) -> Column:
    """Cuts a tensor of several micro-batches into one per micro-batch.

    Args:
        tensor: holds ``sum(sizes)`` samples, each the same number of entries of ``batch_dim``.
        sizes: samples of each micro-batch.
        batch_dim: the dimension of the samples.
        name: of the value, for the error text.

    Shapes:
        - tensor: ``(..., sum(sizes) * k, ...)``
        - returns: ``(..., sizes[i] * k, ...)`` for every i

    Raises:
        ValueError: the tensor has no such dimension, or its size is not a multiple of the samples.

    >>> [piece.tolist() for piece in cut(torch.arange(6), [1, 2], batch_dim=0, name="x")]
    [[0, 1], [2, 3, 4, 5]]
    """
    if len(sizes) == 1:
        return (tensor,)
    samples = sum(sizes)
    if batch_dim is None or tensor.dim() <= batch_dim or tensor.shape[batch_dim] % samples:
        raise ValueError(
            f"value {name!r} of shape {tuple(tensor.shape)} cannot be cut into micro-batches of "
            f"{list(sizes)} samples; {_REMEDY}"
        )
    entries = tensor.shape[batch_dim] // samples
    return Slices.of_samples(batch_dim, entries, sizes).cut(tensor, len(sizes))


@dataclass(frozen=True, slots=True)
class Cutter:
    """How values are cut and joined.

    Attributes:
        dims: value name -> dimension of the samples, or of the vertices, for each of its tensors.
        variations: value name -> how it goes with them; with samples, unless it says so.
        doubtful: what should be the same in all parts and lies on a device, by name: whether it
            is, which :meth:`check` looks at once they all have been joined.
    """

    dims: Mapping[str, tuple[int | None, ...]] = field(default_factory=dict)
    variations: Mapping[str, Variation] = field(default_factory=dict)
    doubtful: list[tuple[str, Tensor]] = field(default_factory=list, compare=False)

    def cut(
        self, names: Sequence[str], payload: Payload, sizes: Sequence[int], *, backward: bool
    ) -> list[Payload]:
        """One payload per part.

        Args:
            names: of the values in it.
            payload: of all parts.
            sizes: samples of each part.
            backward: whether it holds the gradients of values that were joined.

        Raises:
            ValueError: a value cannot be cut.
        """
        tensors = zip(payload.tensors, self._dims(names, len(payload.tensors)), strict=True)
        columns = [self._cut(tensor, sizes, dim, name, backward) for tensor, (name, dim) in tensors]
        structures: list[bytes | None] = [payload.structure] * len(sizes)
        if payload.structure is not None:
            values = self._structures(names, [payload.structure])[0]
            structures = [
                pickle.dumps(
                    [
                        _share(value, size, sum(sizes), name) if self._counts(name) else value
                        for name, value in zip(names, values, strict=True)
                    ]
                )
                for size in sizes
            ]
        return [
            Payload([column[i] for column in columns], payload.requires_grad, structures[i])
            for i in range(len(sizes))
        ]

    def join(
        self,
        names: Sequence[str],
        payloads: Sequence[Payload],
        sizes: Sequence[int],
        backward: bool,
    ) -> Payload:
        """The payload of all parts.

        Args:
            names: of the values in it.
            payloads: of each part.
            sizes: samples of each part.
            backward: whether they hold gradients of values that were cut.

        Raises:
            ValueError: values cannot be joined.
        """
        first = payloads[0]
        tensors = [
            self._join([p.tensors[i] for p in payloads], sizes, dim, name, backward)
            for i, (name, dim) in enumerate(self._dims(names, len(first.tensors)))
        ]
        structure = None
        if first.structure is not None:
            parts = self._structures(names, [each.structure for each in payloads])
            columns = zip(names, zip(*parts, strict=True), strict=True)
            structure = pickle.dumps([self._joined(name, column) for name, column in columns])
        return Payload(tensors, first.requires_grad, structure)

    def _cut(
        self, tensor: Tensor | None, sizes: Sequence[int], dim: int | None, name: str, back: bool
    ) -> Column:
        if tensor is None:
            return [None] * len(sizes)
        if self.variations.get(name) is Variation.SAME:
            return [tensor] + [None if back else tensor] * (len(sizes) - 1)
        return cut(tensor, sizes, dim, name)

    def _join(
        self, parts: Column, sizes: Sequence[int], dim: int | None, name: str, back: bool
    ) -> Tensor | None:
        """Joins what was cut; pieces that are missing (gradients that do not exist) are zero."""
        known = next((i for i, part in enumerate(parts) if part is not None), 0)
        first = parts[known]
        if len(parts) == 1 or first is None:
            return first
        if self.variations.get(name) is Variation.SAME:
            return Slices(None).joined(parts) if back else self._the_same(parts, name)
        if dim is None:
            raise ValueError(
                f"value {name!r} does not grow with the samples, so stages of different "
                f"micro-batch sizes cannot exchange it; {_REMEDY}"
            )
        entries = first.shape[dim] // sizes[known]
        return Slices.of_samples(dim, entries, sizes).joined(parts)

    def _the_same(self, parts: Column, name: str) -> Tensor:
        """The first of some tensors that should hold the same."""
        first, *others = [part for part in parts if part is not None]
        for part in others:
            is_same = part.shape == first.shape and (part.is_meta or (part == first).all())
            self.doubtful.append((name, torch.as_tensor(is_same)))
        if first.device.type == "cpu":
            self.check()
        return first

    def _joined(self, name: str, column: Sequence[Any]) -> Any:
        """What is no tensor, of all parts."""
        if self._counts(name):
            return sum(column)
        if any(value != column[0] for value in column):
            raise ValueError(
                f"{name!r} differs between micro-batches and is no tensor, so they cannot be "
                f"joined; {_REMEDY}"
            )
        return column[0]

    def check(self) -> None:
        """Looks at what was joined on a device, for which the host waits once.

        Raises:
            ValueError: what should have been the same was not.
        """
        doubtful = [*self.doubtful]
        self.doubtful.clear()
        for (name, _), is_same in zip(doubtful, to_host(f for _, f in doubtful), strict=True):
            if not is_same:
                raise ValueError(
                    f"{name!r} depended on no samples when the model was captured, but differs now "
                    f"between micro-batches (a dropout, say), which cannot be joined; {_REMEDY}"
                )

    def _dims(self, names: Sequence[str], count: int) -> list[tuple[str, int | None]]:
        """(value name, batch dimension) of every tensor."""
        dims = [(name, dim) for name in names for dim in self.dims.get(name, (None,))]
        if len(dims) != count:
            raise ValueError(
                f"{', '.join(names)} hold {count} tensors where the captured model has "
                f"{len(dims)}, so they cannot be cut or joined; {_REMEDY}"
            )
        return dims

    def _counts(self, name: str) -> bool:
        return self.variations.get(name) is Variation.COUNT

    def _structures(
        self, names: Sequence[str], pickled: Sequence[bytes | None]
    ) -> list[Sequence[Any]]:
        """What is no tensor; a number of which nothing is known may be a count of samples."""
        structures = [pickle.loads(each) for each in pickled if each]
        for name, value in zip(names, structures[0], strict=True):
            if self.variations.get(name) in (Variation.SAME, Variation.COUNT):
                continue
            leaves = pytree.tree_leaves(value)
            if any(isinstance(v, int | float) and not isinstance(v, bool) for v in leaves):
                raise ValueError(
                    f"{name!r} holds plain numbers, which may be counts of samples, so it cannot "
                    f"be cut or joined; {_REMEDY}"
                )
        return structures


def _share(value: float, size: int, total: int, name: str) -> float:
    """The part of a number that belongs to ``size`` of ``total`` samples.

    >>> _share(12, 1, 4, "n")
    3
    """
    if isinstance(value, int):
        if value * size % total:
            raise ValueError(
                f"{name!r} is {value} for {total} samples, of which {size} have no whole share; "
                f"{_REMEDY}"
            )
        return value * size // total
    return value * size / total
