"""Factors of a view: which dimensions of the input are which of the output.

The elements keep their order, so a factor of either shape is a step between two products of leading
dimensions. Where the two shapes' products divide each other in order, these steps are factors of
both: ``(6, 4, 32) -> (6, 16, 8)`` is ``s b (h d) -> s (b h) d``. Else (``(6, 4) -> (4, 6)``) that
part of the dimensions has no factor that both share, and stays whole.
"""

from __future__ import annotations

import math

from lightning_gpp.spmd.rules.factors import Dims, FactorSpec


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
    sizes: dict[str, int] = {}
    if math.prod(source):
        for start, end in _steps(_products(source), _products(target)):
            sizes[str(start)] = end // start
    linear = (frozenset({0}),)
    return FactorSpec((_dims(source, sizes),), (_dims(target, sizes),), sizes, linear=linear)


def _products(shape: tuple[int, ...]) -> set[int]:
    """Products of the leading dimensions.

    >>> sorted(_products((6, 4, 1)))
    [1, 6, 24]
    """
    return {math.prod(shape[:count]) for count in range(len(shape) + 1)}


def _steps(source: set[int], target: set[int]) -> list[tuple[int, int]]:
    """Steps between products that both shapes can be cut at.

    Between two products that both have, all are kept where each divides the next, else none.
    """
    common, found = sorted(source & target), []
    for start, end in zip(common, common[1:]):
        points = [start, *sorted(p for p in source | target if start < p < end), end]
        if all(after % before == 0 for before, after in zip(points, points[1:])):
            found += list(zip(points, points[1:]))
    return found


def _dims(shape: tuple[int, ...], sizes: dict[str, int]) -> Dims:
    dims: list[tuple[str, ...]] = []
    product = 1
    for length in shape:
        start, product = product, product * length
        dims.append(tuple(name for name in sizes if start <= int(name) < product))
    return tuple(dims)
