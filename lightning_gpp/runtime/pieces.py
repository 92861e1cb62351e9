"""Cuts and joins values between stages whose micro-batches differ in size.

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_gpp.common.host_copies import to_host
from lightning_gpp.graph import Variation

Column = Sequence[Tensor | None]

_REMEDY = "give the stages on both sides the same microbatch_multiple and as many devices"


@dataclass(frozen=True, slots=True)
class Slices:
    """Consecutive parts of a tensor.

    Attributes:
        dim: dimension that is cut; None where every part is the whole tensor.
        lengths: length of each part.
        shifts: what is subtracted from the entries of each part; nothing if there are none.
        overlap: entries that a part shares with the next.
    """

    dim: int | None
    lengths: tuple[int, ...] = ()
    shifts: tuple[int, ...] = ()
    overlap: int = 0

    @classmethod
    def of_samples(cls, dim: int | None, entries: int, sizes: Sequence[int]) -> Slices:
        """Those of a tensor with so many entries per sample, for pieces of so many samples."""
        return cls(dim) if dim is None else cls(dim, tuple([size * entries for size in sizes]))

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
    """Cuts and joins the values of a model.

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
        self, names: Sequence[str], values: Sequence[Any], sizes: Sequence[int], *, backward: bool
    ) -> list[list[Any]]:
        """The values of each part.

        Args:
            names: of the values.
            values: of all parts; with ``backward`` the gradients of the tensors in them.
            sizes: samples of each part.
            backward: whether these are gradients of values that were joined.

        Raises:
            ValueError: a value cannot be cut.
        """
        leaves, structure = pytree.tree_flatten(list(values))
        places = self._places(names, values, backward)
        columns = [
            self._cut(leaf, sizes, dim, name, backward)
            for leaf, (name, dim) in zip(leaves, places, strict=True)
        ]
        return [
            pytree.tree_unflatten([column[part] for column in columns], structure)
            for part in range(len(sizes))
        ]

    def join(
        self,
        names: Sequence[str],
        parts: Sequence[Sequence[Any]],
        sizes: Sequence[int],
        *,
        backward: bool,
    ) -> list[Any]:
        """The values of all parts; their tensors are leaves.

        Args:
            names: of the values.
            parts: values of each part; with ``backward`` the gradients of the tensors in them.
            sizes: samples of each part.
            backward: whether these are gradients of values that were cut.

        Raises:
            ValueError: values cannot be joined.
        """
        structure, *others = (pytree.tree_structure(list(part)) for part in parts)
        if any(other != structure for other in others):
            raise ValueError(f"{', '.join(names)} differ between micro-batches in what they hold")
        places = self._places(names, parts[0], backward)
        columns = zip(*(pytree.tree_leaves(list(part)) for part in parts), strict=True)
        leaves = [
            self._join(column, sizes, dim, name, backward)
            for column, (name, dim) in zip(columns, places, strict=True)
        ]
        joined: list[Any] = pytree.tree_unflatten(leaves, structure)
        return joined

    def _places(
        self, names: Sequence[str], values: Sequence[Any], backward: bool
    ) -> list[tuple[str, int | None]]:
        """(value name, batch dimension) of every leaf; of what is no tensor there is none."""
        if backward:
            return [(name, dim) for name in names for dim in self.dims.get(name, (None,))]
        found: list[tuple[str, int | None]] = []
        for name, value in zip(names, values, strict=True):
            leaves = pytree.tree_leaves(value)
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            dims = self.dims.get(name, (None,) * len(tensors))
            if len(tensors) != len(dims) or any(t.layout is not torch.strided for t in tensors):
                raise ValueError(
                    f"{name!r} holds {len(tensors)} tensors where the captured model has "
                    f"{len(dims)}, or sparse ones, so it cannot be cut or joined; {_REMEDY}"
                )
            of_tensors = iter(dims)
            found += [
                (name, next(of_tensors) if isinstance(leaf, Tensor) else None) for leaf in leaves
            ]
        return found

    def _cut(
        self, leaf: Any, sizes: Sequence[int], dim: int | None, name: str, backward: bool
    ) -> Sequence[Any]:
        if isinstance(leaf, Tensor) and self.variations.get(name) is not Variation.SAME:
            return cut(leaf, sizes, dim, name)
        if backward:  # the first part has the whole gradient
            return [leaf] + [None] * (len(sizes) - 1)
        if not isinstance(leaf, Tensor) and self._counts(name, leaf):
            return [_share(leaf, size, sum(sizes), name) for size in sizes]
        return [leaf] * len(sizes)

    def _join(
        self, column: Sequence[Any], sizes: Sequence[int], dim: int | None, name: str, back: bool
    ) -> Any:
        """Joins what was cut; gradients that do not exist are zero."""
        known = next((i for i, part in enumerate(column) if part is not None), 0)
        first = column[known]
        if first is None:
            return None
        if not isinstance(first, Tensor) or not (back or all(p is not None for p in column)):
            if self._counts(name, first):
                return sum(column)
            if isinstance(first, Tensor) or any(value != first for value in column):
                raise ValueError(
                    f"{name!r} differs between micro-batches and is no tensor, so they cannot be "
                    f"joined; {_REMEDY}"
                )
            return first
        if self.variations.get(name) is Variation.SAME:
            return Slices(None).joined(column) if back else self._the_same(column, name)
        if dim is None:
            raise ValueError(
                f"value {name!r} does not grow with the samples, so stages of different "
                f"micro-batch sizes cannot exchange it; {_REMEDY}"
            )
        with torch.no_grad():
            joined = Slices.of_samples(dim, first.shape[dim] // sizes[known], sizes).joined(column)
        return joined if joined is None else joined.requires_grad_(first.requires_grad)

    def _the_same(self, parts: Sequence[Tensor], name: str) -> Tensor:
        """The first of some tensors that should hold the same."""
        first, *others = parts
        for part in others:
            is_same = part.shape == first.shape and (part.is_meta or (part == first).all())
            self.doubtful.append((name, torch.as_tensor(is_same)))
        if first.device.type == "cpu":
            self.check()
        return first

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
                    f"{name!r} depended on no sample when the model was captured, but now differs "
                    f"between micro-batches (by dropout, say), so they cannot be joined; {_REMEDY}"
                )

    def _counts(self, name: str, value: Any) -> bool:
        """Whether what is no tensor counts samples; of an unknown number nobody knows that.

        Raises:
            ValueError: it is such a number.
        """
        variation = self.variations.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and variation not in (Variation.SAME, Variation.COUNT):
            raise ValueError(
                f"{name!r} holds plain numbers, which may be counts of samples, so it cannot be "
                f"cut or joined; {_REMEDY}"
            )
        return variation is Variation.COUNT


def _share(value: float, size: int, total: int, name: str) -> float:
    """The part of a number that belongs to ``size`` of ``total`` samples.

    >>> _share(12, 1, 4, "n")
    3
    """
    if isinstance(value, int):
        if value * size % total:
            raise ValueError(
                f"{name!r} is {value} for {total} samples, which does not divide by samples: "
                f"{size} of them would get no whole number; {_REMEDY}"
            )
        return value * size // total
    return value * size / total
