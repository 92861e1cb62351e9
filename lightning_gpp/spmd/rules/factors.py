"""What an operator does to every dimension, written as *factors*, as einsum does.

Every dimension of every input and output is a product of named factors. One line of such text
says all sound ways to divide the operator::

    linear     … i, o i, o -> … o

Dealing a factor to the devices shards every tensor that has it along that dimension; a tensor that
has it not is replicated; an output that has it not is a sum over the devices, and so is whatever is
*added* to such an output (the bias ``o`` where ``i`` is divided). Some factors have to stay whole
(the classes of a softmax). The idea is that of Shardy's operator sharding rules and of einsum
strategies in ``torch.distributed.tensor``.

Factors of different operators meet in *axes*: a dimension is a product of what every operator that
it passes through sees as one piece. The output of a linear layer of width 768 that a view later
takes as 12 heads of width 64 has the axes 12 and 64, and so have the rows of the layer's weight.
One cut per axis keeps the search small, and no cut has to be redone at the view. The axes follow
from the factors of all operators, by passing every boundary on until nothing changes. Boundaries
that do not divide each other (12 heads here, 8 there) are not joined: each holds where it came
from, and a rule is only offered where it fits all of its tensors.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from lightning_gpp.spmd.operator_graph import SpmdGraph, SpmdOperator
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
        whole: factors that cannot be divided.
        added: indices of inputs that are added to the result: where a factor that the output lacks
            is divided, they are summands.
        linear: sets of inputs in which the operator is linear together, the others being fixed:
            with these as summands, the outputs are summands.
        options: what a device does beyond the plain call where a factor is divided.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    sizes: Mapping[str, int]
    whole: Set[str] = frozenset()
    added: Set[int] = frozenset()
    linear: Sequence[Set[int]] = ()
    options: Mapping[str, Option] = field(default_factory=dict)

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


class FactorCut(NamedTuple):
    """A factor divided in units: the factor seen as ``(outer, units, block)``."""

    factor: str
    outer: int
    units: int


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


@dataclass(frozen=True, slots=True)
class ShapedCall:
    """An operator with the shapes of its tensors.

    Attributes:
        operator: the operator.
        inputs: shapes of its inputs.
        outputs: shapes of its outputs.
    """

    operator: SpmdOperator
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(graph: SpmdGraph, operator: SpmdOperator) -> ShapedCall:
        """The call of an operator of a graph."""
        names = operator.inputs, operator.outputs
        inputs, outputs = (tuple(graph.value_of[name].shape for name in side) for side in names)
        return ShapedCall(operator, inputs, outputs)

    def get(self, argument: str, default: Any = None) -> Any:
        """An argument that is no tensor, or what the operator takes where it is not given."""
        return self.operator.attributes.get(argument, default)

    def index(self, *arguments: str) -> set[int]:
        """Which inputs are given as some arguments, as far as they are given."""
        given = self.operator.arguments
        return {given.index(argument) for argument in arguments if argument in given}

    @property
    def names(self) -> list[str]:
        """A factor per dimension of the first input."""
        return [f"x{dim}" for dim in range(len(self.inputs[0]))]

    def dim(self, argument: str = "dim", default: int | None = None, more: int = 0) -> int:
        """An argument that is a dimension of the first input (or of ``more``), from the front."""
        return int(self.get(argument, default)) % max(len(self.inputs[0]) + more, 1)

    def dims(self, argument: str = "dim") -> list[int]:
        """An argument that is dimensions; all of the first input where it is None or empty."""
        given, rank = self.get(argument), len(self.inputs[0])
        several = [given] if isinstance(given, int) else given or range(rank)
        return [int(dim) % max(rank, 1) for dim in several]

    def spec(self, text: str, **more: Any) -> FactorSpec:
        """Factors from a line of text, with further attributes of a :class:`FactorSpec`."""
        return replace(spec_of_text(text, self.inputs, self.outputs), **more)

    def by_argument(self, texts: Mapping[str, str], outputs: str, **more: Any) -> FactorSpec:
        """Factors from a text per argument, of those that are given.

        Raises:
            KeyError: a tensor is given as an argument that has no text.
        """
        left = ", ".join(texts[argument] for argument in self.operator.arguments)
        return self.spec(f"{left} -> {outputs}", **more)

    def moved(self, *outputs: Iterable[str], **more: Any) -> FactorSpec:
        """Factors of one input, whose dimensions are :attr:`names`; by default it is linear."""
        right = ", ".join(" ".join(output) for output in outputs)
        return self.spec(f"{' '.join(self.names)} -> {right}", **{"linear": [{0}], **more})

    def dimensionwise(self, whole: Iterable[int] = (), **more: Any) -> FactorSpec:
        """Factors of an operator whose tensors all have the dimensions of the first output.

        Args:
            whole: dimensions that cannot be divided.
            more: further attributes.
        """
        left, right = (", ".join(["…"] * len(side)) for side in (self.inputs, self.outputs))
        rank = len(self.outputs[0])
        return self.spec(f"{left} -> {right}", whole={f"…{rank - dim}" for dim in whole}, **more)


def reshape_spec(source: tuple[int, ...], target: tuple[int, ...]) -> FactorSpec:
    """The factors of a reshape; a factor is named by the product of what is before it.

    Args:
        source: shape of the input.
        target: shape of the output, of as many elements.

    >>> spec = reshape_spec((6, 4, 32), (6, 16, 8))
    >>> spec.inputs[0], spec.outputs[0]
    ((('1',), ('6',), ('24', '96')), (('1',), ('6', '24'), ('96',)))
    >>> reshape_spec((5, 6, 4), (5, 4, 6)).inputs[0]
    (('1',), (), ())
    """
    one, other = (
        {math.prod(shape[:n]) for n in range(len(shape) + 1)} for shape in (source, target)
    )
    common, sizes = sorted(one & other), dict[str, int]()
    for start, end in zip(common, common[1:]) if common[0] else ():
        # Between two products that both have, all are kept where each divides the next, else none.
        points = [start, *sorted(p for p in one | other if start < p < end), end]
        steps = [*zip(points, points[1:])]
        if all(after % before == 0 for before, after in steps):
            sizes |= {str(before): after // before for before, after in steps}
    return FactorSpec(
        (_dims_of_view(source, sizes),), (_dims_of_view(target, sizes),), sizes, linear=[{0}]
    )


def _dims_of_view(shape: tuple[int, ...], sizes: dict[str, int]) -> Dims:
    dims: list[tuple[str, ...]] = []
    product = 1
    for length in shape:
        start, product = product, product * length
        dims.append(tuple(name for name in sizes if start <= int(name) < product))
    return tuple(dims)


Chain = tuple[int, ...]
"""Products of the leading axes of a dimension, from 1 to its length."""


class Axes:
    """The axes of all dimensions of a graph.

    Args:
        graph: the model.
        specs: factors of every operator that has some, by its name.
    """

    def __init__(self, graph: SpmdGraph, specs: Mapping[str, FactorSpec]) -> None:
        self._specs = specs
        self._chains: dict[str, list[Chain]] = {
            value.name: [_undivided(length) for length in value.shape] for value in graph.values
        }
        readers: defaultdict[str, dict[str, None]] = defaultdict(dict)
        for name in specs:
            operator = graph.operator_of[name]
            for tensor in (*operator.inputs, *operator.outputs):
                readers[tensor][name] = None
        waiting = dict.fromkeys(specs)
        while waiting:
            name = next(iter(waiting))
            del waiting[name]
            for tensor in self._refine(graph.operator_of[name]):
                waiting |= readers[tensor]

    def _refine(self, operator: SpmdOperator) -> set[str]:
        """Joins the axes of one operator's tensors; returns the tensors that got new ones."""
        changed = set()
        for factor in self._specs[operator.name].sizes:
            chain = self._chain(factor, operator)
            for name, dim, outer in self._places(factor, operator):
                old = self._chains[name][dim]
                new = _joined(old, tuple(outer * point for point in chain))
                if new is not None and new != old:
                    self._chains[name][dim] = new
                    changed.add(name)
        return changed

    def _places(self, factor: str, operator: SpmdOperator) -> Iterator[tuple[str, int, int]]:
        """Tensors that have a factor, with its dimension and what is before it there."""
        spec = self._specs[operator.name]
        for name, dims in operator.operands(spec.inputs, spec.outputs):
            if place := spec.place(factor, dims):
                yield name, *place

    def _chain(self, factor: str, operator: SpmdOperator) -> Chain:
        """The boundaries inside a factor, of all tensors that have it, as far as they fit."""
        size = self._specs[operator.name].sizes[factor]
        chain = _undivided(size)
        for name, dim, outer in self._places(factor, operator):
            inner = tuple(
                point // outer
                for point in self._chains[name][dim]
                if point % outer == 0 and size % (point // outer) == 0
            )
            chain = _joined(chain, inner) or chain
        return chain

    def cuts(self, operator: SpmdOperator, least_units: int) -> Iterator[FactorCut]:
        """Ways to divide an operator's factors, with so many units that each device has some."""
        for factor in self._specs[operator.name].sizes:
            for outer, units in _steps(self._chain(factor, operator), least_units):
                yield FactorCut(factor, outer, units)

    def cuts_of(self, name: str, least_units: int) -> Iterator[tuple[int, int, int]]:
        """The cuts of a tensor: dimension, outer, units."""
        for dim, chain in enumerate(self._chains[name]):
            for outer, units in _steps(chain, least_units):
                yield dim, outer, units


def _undivided(length: int) -> Chain:
    return (1, length) if length > 1 else (1,)


def _steps(chain: Chain, least_units: int) -> Iterator[tuple[int, int]]:
    for start, end in zip(chain, chain[1:]):
        if end // start >= least_units:
            yield start, end // start


def _joined(one: Chain, other: Chain) -> Chain | None:
    """All boundaries of both, where each divides the next; else None.

    >>> _joined((1, 12), (1, 3, 12)), _joined((1, 4, 12), (1, 3, 12))
    ((1, 3, 12), None)
    """
    points = tuple(sorted({*one, *other}))
    divide = all(after % before == 0 for before, after in zip(points, points[1:]))
    return points if divide else None
