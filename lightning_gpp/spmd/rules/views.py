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
    return FactorSpec((_dims(source, sizes),), (_dims(target, sizes),), sizes, linear=[{0}])


def _dims(shape: tuple[int, ...], sizes: dict[str, int]) -> Dims:
    dims: list[tuple[str, ...]] = []
    product = 1
    for length in shape:
        start, product = product, product * length
        dims.append(tuple(name for name in sizes if start <= int(name) < product))
    return tuple(dims)
