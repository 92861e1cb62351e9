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

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_gpp.spmd.program import Option

Dims = tuple[tuple[str, ...], ...]
"""Per dimension of a tensor the factors whose product is its length; none for a length of 1 (also
for a dimension that is broadcast)."""


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
    sizes: Mapping[str, int] = field(hash=False)
    whole: frozenset[str] = frozenset()
    added: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    options: Mapping[str, Option] = field(default_factory=dict, hash=False)
    samples: frozenset[str] = frozenset()
    weight: int | None = None

    def places(self, tensor: Dims) -> dict[str, tuple[int, int]]:
        """Where the factors of a tensor are: factor -> dimension, and product of those before it.

        >>> FactorSpec((), (), {"h": 12, "d": 64}).places(((), ("h", "d")))
        {'h': (1, 1), 'd': (1, 12)}
        """
        found: dict[str, tuple[int, int]] = {}
        for dim, factors in enumerate(tensor):
            outer = 1
            for factor in factors:
                found[factor] = (dim, outer)
                outer *= self.sizes[factor]
        return found


def spec_of_text(
    text: str,
    shapes_in: tuple[tuple[int, ...], ...],
    shapes_out: tuple[tuple[int, ...], ...],
    **given: int,
) -> FactorSpec:
    """Factors from a line of text.

    Args:
        text: dimensions of the inputs, ``->``, those of the outputs; tensors are separated by
            commas, dimensions by spaces. ``…`` stands for the dimensions in front: from the right,
            those of equal length are the same factor, and a length of 1 is none. ``(h d)`` is a
            product; ``1`` a dimension of length 1.
        shapes_in: of the inputs.
        shapes_out: of the outputs.
        given: sizes of factors that are only in products.

    >>> spec = spec_of_text("… i, o i -> … o", ((8, 5, 3), (4, 3)), ((8, 5, 4),))
    >>> spec.inputs[0], spec.outputs[0]
    ((('…2',), ('…1',), ('i',)), (('…2',), ('…1',), ('o',)))
    """
    sizes = dict(given)
    left, right = text.split("->")
    tensors_in = _tensors(left, shapes_in, sizes)
    tensors_out = _tensors(right, shapes_out, sizes)
    return FactorSpec(tensors_in, tensors_out, sizes)


def _tensors(
    text: str, shapes: tuple[tuple[int, ...], ...], sizes: dict[str, int]
) -> tuple[Dims, ...]:
    texts = [part.strip() for part in text.split(",")] if text.strip() or shapes else []
    if len(texts) != len(shapes):
        raise AssertionError(f"{text!r} has {len(texts)} tensors, the operator has {len(shapes)}")
    return tuple(_dims(part, shape, sizes) for part, shape in zip(texts, shapes))


def _dims(text: str, shape: tuple[int, ...], sizes: dict[str, int]) -> Dims:
    tokens = _tokens(text)
    front = len(shape) - (len(tokens) - 1) if ("…",) in tokens else 0
    names: list[tuple[str, ...]] = []
    for token in tokens:
        names += [(f"…{front - i}",) for i in range(front)] if token == ("…",) else [token]
    if len(names) != len(shape):
        raise AssertionError(f"{text!r} does not fit shape {shape}")
    dims: list[tuple[str, ...]] = []
    for token, length in zip(names, shape):
        if length == 1 or token == ("1",):
            dims.append(())
            continue
        open_factors = [name for name in token if name not in sizes]
        if len(token) == 1 and open_factors:
            sizes[token[0]] = length
        product = 1
        for name in token:
            product *= sizes[name]
        if product != length:
            raise AssertionError(f"{text!r}: {token} is {product} long, shape is {shape}")
        dims.append(token)
    return tuple(dims)


def _tokens(text: str) -> list[tuple[str, ...]]:
    """Dimensions of a tensor's text, each the names in it.

    >>> _tokens("… (h d) i")
    [('…',), ('h', 'd'), ('i',)]
    """
    found: list[tuple[str, ...]] = []
    group: list[str] | None = None
    for word in text.replace("(", " ( ").replace(")", " ) ").split():
        if word == "(":
            group = []
        elif word == ")":
            found.append(tuple(group or ()))
            group = None
        elif group is not None:
            group.append(word)
        else:
            found.append((word,))
    return found
