"""What an operator does to every dimension, written as *factors*, as einsum does.

Every dimension of every input and output is a product of named factors. One line of such text
says all sound ways to divide the operator::

    linear     … i, o i, o -> … o

Dealing a factor to the devices shards every tensor that has it along that dimension; a tensor that
has it not is replicated; an output that has it not is a sum over the devices, and so is whatever is
*added* to such an output (the bias ``o`` where ``i`` is dealt). Some factors have to stay whole
(the classes of a softmax). The idea is that of Shardy's operator sharding rules and of einsum
strategies in ``torch.distributed.tensor``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from lightning_gpp.spmd.program import Option

Dims = tuple[tuple[str, ...], ...]
"""Per dimension of a tensor the factors whose product is its length; none for a length of 1 (also
for a dimension that is broadcast)."""

Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class FactorSpec:
    """The dimensions of an operator's tensors, as factors.

    Attributes:
        inputs: of every input.
        outputs: of every output.
        sizes: length of every factor.
        whole: factors that cannot be dealt.
        added: indices of inputs that are added to the result: where a factor that the output lacks
            is dealt, they are summands.
        linear: sets of inputs in which the operator is linear together, the others being fixed:
            with these as summands, the outputs are summands.
        options: what a device does beyond the plain call where a factor is dealt.
        samples: factors along which the samples lie: where one is dealt, the gradient of ``weight``
            may come from gathered factors.
        weight: index of the input whose gradient is then computed from the gathered factors; None
            where that is not offered.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    sizes: Mapping[str, int]
    whole: Set[str] = frozenset()
    added: Set[int] = frozenset()
    linear: Sequence[Set[int]] = ()
    options: Mapping[str, Option] = field(default_factory=dict)
    samples: Set[str] = frozenset()
    weight: int | None = None

    def place(self, factor: str, tensor: Dims) -> tuple[int, int] | None:
        """Where a tensor has a factor: the dimension, and the product of the factors before it.

        >>> FactorSpec((), (), {"h": 12, "d": 64}).place("d", ((), ("h", "d")))
        (1, 12)
        """
        for dim, factors in enumerate(tensor):
            outer = 1
            for each in factors:
                if each == factor:
                    return dim, outer
                outer *= self.sizes[each]
        return None


def spec_of_text(text: str, inputs: Shapes, outputs: Shapes) -> FactorSpec:
    """Factors from a line of text.

    Args:
        text: dimensions of the inputs, ``->``, those of the outputs; tensors are separated by
            commas, dimensions by spaces. ``…`` stands for further dimensions: from the right,
            those of equal length are the same factor. ``1`` is a dimension without a factor, and so
            is any of length 1.
        inputs: shapes of the inputs.
        outputs: of the outputs.

    >>> spec = spec_of_text("… i, o i -> … o", ((8, 5, 3), (4, 3)), ((8, 5, 4),))
    >>> spec.inputs[0], spec.outputs[0]
    ((('…2',), ('…1',), ('i',)), (('…2',), ('…1',), ('o',)))
    """
    sizes: dict[str, int] = {}
    left, right = text.split("->")
    return FactorSpec(tuple(_dims(left, inputs, sizes)), tuple(_dims(right, outputs, sizes)), sizes)


def _dims(text: str, shapes: Shapes, sizes: dict[str, int]) -> Iterator[Dims]:
    for tensor, shape in zip(text.split(","), shapes, strict=True):
        names = tensor.split()
        if "…" in names:
            place, front = names.index("…"), len(shape) - len(names) + 1
            names[place : place + 1] = [f"…{front - i}" for i in range(front)]
        dims: list[tuple[str, ...]] = []
        for name, length in zip(names, shape, strict=True):
            is_factor = length > 1 and name != "1"
            if is_factor and sizes.setdefault(name, length) != length:
                raise AssertionError(f"{text!r}: {name} is {sizes[name]} long, shape is {shape}")
            dims.append((name,) if is_factor else ())
        yield tuple(dims)
