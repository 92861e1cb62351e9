"""Cutting and joining payloads: one rule per value, by how it goes with the samples or vertices.

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

from lightning_gpp.graph import Variation
from lightning_gpp.host_copies import to_host
from lightning_gpp.runtime.payload import Payload
from lightning_gpp.runtime.pieces import cut, join

Column = Sequence[Tensor | None]

_REMEDY = "give the stages on both sides the same microbatch_multiple and as many devices"


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
        columns = [
            self._cut_tensor(tensor, sizes, dim, name, backward)
            for tensor, (name, dim) in zip(
                payload.tensors, self._dims(names, len(payload.tensors)), strict=True
            )
        ]
        structures = self._cut_structure(names, payload.structure, sizes)
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
            self._join_tensors([p.tensors[i] for p in payloads], sizes, dim, name, backward)
            for i, (name, dim) in enumerate(self._dims(names, len(first.tensors)))
        ]
        structure = self._join_structures(names, [payload.structure for payload in payloads])
        return Payload(tensors, first.requires_grad, structure)

    def _cut_tensor(
        self, tensor: Tensor | None, sizes: Sequence[int], dim: int | None, name: str, back: bool
    ) -> Column:
        if tensor is None:
            return [None] * len(sizes)
        if self.variations.get(name) is Variation.SAME:
            return [tensor] + [None if back else tensor] * (len(sizes) - 1)
        return cut(tensor, sizes, dim, name)

    def _join_tensors(
        self, parts: Column, sizes: Sequence[int], dim: int | None, name: str, back: bool
    ) -> Tensor | None:
        if self.variations.get(name) is not Variation.SAME:
            return join(parts, sizes, dim, name)
        found = [part for part in parts if part is not None]
        if back:
            return torch.stack(found).sum(0) if found else None
        first = found[0]
        if any(part.shape != first.shape for part in found):
            raise _not_the_same(name)
        self.doubtful.extend(
            (name, (part == first).all()) for part in found[1:] if not part.is_meta
        )
        if first.device.type == "cpu":
            self.check()
        return first

    def check(self) -> None:
        """Looks at what was joined on a device, for which the host waits once.

        Raises:
            ValueError: what should have been the same was not.
        """
        names, flags = [name for name, _ in self.doubtful], [flag for _, flag in self.doubtful]
        self.doubtful.clear()
        for name, is_same in zip(names, to_host(flags), strict=True):
            if not is_same:
                raise _not_the_same(name)

    def _dims(self, names: Sequence[str], count: int) -> list[tuple[str, int | None]]:
        """(value name, batch dimension) of every tensor."""
        dims = [(name, dim) for name in names for dim in self.dims.get(name, (None,))]
        if len(dims) != count:
            raise ValueError(
                f"{', '.join(names)} hold {count} tensors where the captured model has "
                f"{len(dims)}, so they cannot be cut or joined; {_REMEDY}"
            )
        return dims

    def _cut_structure(
        self, names: Sequence[str], structure: bytes | None, sizes: Sequence[int]
    ) -> Sequence[bytes | None]:
        if structure is None:
            return [None] * len(sizes)
        values, total = pickle.loads(structure), sum(sizes)
        for name, value in zip(names, values, strict=True):
            self._refuse_numbers(name, value)
        return [
            pickle.dumps(
                [
                    _share(value, size, total, name) if self._counts(name) else value
                    for name, value in zip(names, values, strict=True)
                ]
            )
            for size in sizes
        ]

    def _join_structures(
        self, names: Sequence[str], structures: Sequence[bytes | None]
    ) -> bytes | None:
        if structures[0] is None:
            return None
        parts = [pickle.loads(structure) for structure in structures if structure is not None]
        joined = []
        for name, *column in zip(names, *parts, strict=True):
            self._refuse_numbers(name, column[0])
            if not self._counts(name) and any(value != column[0] for value in column):
                raise ValueError(
                    f"{name!r} differs between micro-batches and is no tensor, so they cannot be "
                    f"joined; {_REMEDY}"
                )
            joined.append(sum(column) if self._counts(name) else column[0])
        return pickle.dumps(joined)

    def _counts(self, name: str) -> bool:
        return self.variations.get(name) is Variation.COUNT

    def _refuse_numbers(self, name: str, value: Any) -> None:
        """A number of which nothing is known may be a count of samples."""
        if self.variations.get(name) in (Variation.SAME, Variation.COUNT):
            return
        leaves = pytree.tree_leaves(value)
        if any(isinstance(leaf, int | float) and not isinstance(leaf, bool) for leaf in leaves):
            raise ValueError(
                f"{name!r} holds plain numbers, which may be counts of samples, so it cannot be "
                f"cut or joined; {_REMEDY}"
            )


def _not_the_same(name: str) -> ValueError:
    return ValueError(
        f"{name!r} depended on no samples when the model was captured, but differs between "
        f"micro-batches now (a dropout, say), so they cannot be joined; {_REMEDY}"
    )


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
