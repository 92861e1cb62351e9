"""The cheapest program as a 0-1 program: where memory counts exactly, or tables would be too large.

Every cost is a column that says whether it is paid. The costs that a variable is in agree on its
value, and in a class of devices the bytes of all that are paid are within the limit::

    minimise    sum_c seconds_c * x_c
    subject to  sum_{c of f} x_c = 1                                  every factor f
                sum_{c of f, v = d} x_c = sum_{c of g, v = d} x_c     every variable v of f and g
                sum_c bytes_kc * x_c <= limit_k                       every class k

Without limits its relaxation is whole on the published models, but takes HiGHS twenty to seventy
times as long as elimination (5 s for ViT-48).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from lightning_gpp.spmd.costs.share_cost import Vector
from lightning_gpp.spmd.search.factor_graph import FactorGraph, ProgramAnswer

MOST_NODES = 10_000
"""Of the branch and bound."""

INFEASIBLE = 2
"""SciPy's status."""

TOLERANCE = 1e-5
"""Part of the memory that is left, first none: HiGHS may take a millionth more than there is."""


def cheapest(
    factor_graph: FactorGraph, byte_s: Vector, limits: Vector | None = None
) -> tuple[ProgramAnswer, float] | None:
    """The cheapest program, and what none costs less than; None if none fits.

    Args:
        factor_graph: the choice.
        byte_s: price of a byte per class.
        limits: of memory per class.

    Raises:
        RuntimeError: none was found before the branch and bound was ended.
    """
    every = [factor.costs for factor in factor_graph.factors]
    seconds = np.concatenate([costs.priced(byte_s) for costs in every])
    constraints = [_one_each(factor_graph)]
    if limits is not None:
        memory = np.concatenate([costs.memory_bytes for costs in every])
        constraints.append(LinearConstraint((memory / limits).T, ub=1.0))
    scale = seconds.max() / 1e3 or 1.0  # HiGHS takes sums that differ by a millionth for equal
    solved = milp(
        seconds / scale,
        integrality=np.ones(len(seconds)),
        bounds=Bounds(0, 1),
        constraints=constraints,
        options={"node_limit": MOST_NODES, "mip_rel_gap": 0.0},
    )
    if solved.status == INFEASIBLE:
        return None
    if solved.x is None:
        raise RuntimeError(
            f"no program was found by the solver ({solved.message}); divide less of the model: "
            "name a part of it with module="
        )
    ends = np.cumsum([len(costs.seconds) for costs in every])
    paid = np.flatnonzero(solved.x > 0.5) - np.array([0, *ends[:-1]])
    values = [0] * len(factor_graph.sizes)
    for factor, number in zip(factor_graph.factors, paid, strict=True):
        for variable, value in zip(factor.variables, factor.costs.places[number]):
            values[variable] = int(value)
    answer = ProgramAnswer.of(factor_graph, values, paid.tolist())
    if limits is factor_graph.limits and not answer.fits:
        return cheapest(factor_graph, byte_s, limits * (1 - TOLERANCE))
    return answer, solved.mip_dual_bound * scale


def _one_each(factor_graph: FactorGraph) -> LinearConstraint:
    """One cost of every factor, which agree on the values of variables."""
    first: dict[int, tuple[NDArray[np.intp], NDArray[np.intp]]] = {}
    entries: list[tuple[NDArray[np.intp], NDArray[np.intp], float]] = []
    num_rows, start = len(factor_graph.factors), 0
    for number, factor in enumerate(factor_graph.factors):
        columns = start + np.arange(len(factor.costs.seconds))
        start += len(columns)
        entries.append((np.full(len(columns), number), columns, 1.0))
        for variable, places in zip(factor.variables, factor.costs.places.T):
            known, others = first.setdefault(variable, (places, columns))
            if others is not columns:
                entries.append((num_rows + places, columns, 1.0))
                entries.append((num_rows + known, others, -1.0))
                num_rows += factor_graph.sizes[variable]
    rows, columns = (np.concatenate([entry[part] for entry in entries]) for part in (0, 1))
    signs = np.concatenate([np.full(len(entry[0]), entry[2]) for entry in entries])
    right = (np.arange(num_rows) < len(factor_graph.factors)).astype(float)
    matrix = coo_array((signs, (rows, columns)), shape=(num_rows, start)).tocsr()
    return LinearConstraint(matrix, right, right)
