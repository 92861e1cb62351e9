"""What a search is limited to: nothing, or what a published way of training does.

Baselines are searches that may choose less, so they are compared by the same theory and prices.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpp.spmd.operator_graph import SpmdOperator, SpmdValue
from lightning_gpp.spmd.placement import Placement
from lightning_gpp.spmd.rules.rule import Rule


class Allowed:
    """Everything."""

    def rule(self, operator: SpmdOperator, rule: Rule) -> bool:
        """Whether an operator may be run so."""
        return True

    def storages(self, value: SpmdValue, every: Sequence[Placement]) -> tuple[Placement, ...]:
        """How a parameter may be kept, of every way to."""
        return tuple(every)

    def conversion(self, value: SpmdValue, source: Placement, target: Placement) -> bool:
        """Whether a value may be converted so."""
        return True
