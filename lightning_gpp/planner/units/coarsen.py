"""Fewer units for large models, so that planning them stays a matter of a second.

A unit is merged into its only predecessor, or its only successor, while the two together stay
light. Neither can close a circle: a second path between them would need a second neighbour.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_gpp.cost import Profile
from lightning_gpp.graph import ModelGraph
from lightning_gpp.planner.units.units import UnitGraph, build_units, indivisible_groups

MAX_UNITS = 192
"""Graphs of more units are made coarser."""

UNITS_PER_STAGE = 16
"""A merged unit is at most this fraction of an equal share of the work of a stage."""


def coarse_units(graph: ModelGraph, profile: Profile, num_stages: int) -> UnitGraph:
    """The units of a graph, light neighbours merged where there are more than MAX_UNITS.

    Args:
        graph: the model.
        profile: what its operators cost.
        num_stages: how many stages will be cut; there stay at least as many units.
    """
    units = build_units(graph, profile, indivisible_groups(graph))
    for forward in (True, False):
        if len(units) > max(MAX_UNITS, num_stages):
            limit_s = sum(units.compute_s) / (num_stages * UNITS_PER_STAGE)
            spare = len(units) - max(MAX_UNITS, num_stages)
            merged = _merge_light(units, limit_s, spare, forward=forward)
            groups = {n: merged[u] for u, names in enumerate(units.operators) for n in names}
            units = build_units(graph, profile, groups)
    return units


def _merge_light(units: UnitGraph, limit_s: float, spare: int, *, forward: bool) -> list[int]:
    """Group of every unit after up to ``spare`` mergers in one direction."""
    group = list(range(len(units)))
    weight_s = list(units.compute_s)
    neighbours = units.predecessors if forward else units.successors
    for unit in _walk(units, forward):
        others = {group[neighbour] for neighbour in neighbours[unit]}
        if len(others) != 1 or (forward and unit in units.finals) or not spare:
            continue
        (other,) = others
        if weight_s[other] + weight_s[unit] <= limit_s:
            group[unit] = other
            weight_s[other] += weight_s[unit]
            spare -= 1
    return group


def _walk(units: UnitGraph, forward: bool) -> Iterable[int]:
    order: Sequence[int] = range(len(units))
    return order if forward else reversed(order)
