"""Ranks drafts by their step, within a budget."""

from __future__ import annotations

import math
from collections.abc import Iterable

from lightning_gpp.engine.play import ROUNDING
from lightning_gpp.planner.graphpipe.bounds import DraftBounds
from lightning_gpp.planner.graphpipe.draft import Draft, UnitTables, arranged, draft_of, plan_of
from lightning_gpp.planner.plan.plan import Plan
from lightning_gpp.planner.step_time.evaluate import PlanEvaluation, evaluate_below, evaluate_plan

LOOKS_PER_BOUND = 8
"""So many looks at what the devices compute are taken in the time of one lower bound."""

ACTIONS_PER_LOOK = 4
"""So many forwards and backwards are played in the time of one look."""


CHECKED, ROUGH = 2, 1.05
"""So many of the best plans of a search, and plans of others whose steps are at most so many times
as long, are played to their ends."""

FEW_DEVICES = 16
"""On twice as many devices a played action counts half: steps have more of them there, and searches
may take longer."""


class DraftJudge:
    """Evaluates drafts, and keeps the results.

    Args:
        tables: of the units.
        name: of the planner.
        budget: looks that may be taken; see :attr:`is_spent`.
        least_devices: plans on fewer devices are left out.
        is_chain: whether every stage waits for the one before it.
        beside: a judge with the same tables, which have found bounds for it.

    Attributes:
        name: of the planner.
        best: the best plan that fits into memory: shortest step first, then least memory.
    """

    def __init__(
        self,
        tables: UnitTables,
        name: str,
        budget: int = 0,
        *,
        least_devices: int = 1,
        is_chain: bool = False,
        beside: DraftJudge | None = None,
    ) -> None:
        self.tables = tables
        self._is_chain = is_chain
        self._least_devices = least_devices
        self.best: PlanEvaluation | None = None
        self.name = name
        self._budget: float = budget
        bounds = DraftBounds(tables) if beside is None else beside._bounds
        self._bounds: DraftBounds = bounds
        self._least_s: dict[Draft, float] = {}
        self._step_s: dict[Draft, float] = {}
        self._found: dict[Plan, PlanEvaluation] = {}
        self._spent = 0
        self._is_rough = True
        times = max(1, tables.request.num_devices // FEW_DEVICES)
        self._actions_per_look = ACTIONS_PER_LOOK * times

    @property
    def best_s(self) -> float:
        """Seconds of the step of the best plan; infinite without one."""
        return math.inf if self.best is None else self.best.step_s

    def drafts(self, found: Iterable[PlanEvaluation]) -> list[tuple[Draft, float]]:
        """Plans as drafts, each with its step; those that divide units are left out."""
        drafts = ((draft_of(one.plan, self.tables), one) for one in found)
        return [(draft, one.step_s) for draft, one in drafts if draft is not None]

    @property
    def is_spent(self) -> bool:
        """Whether all looks are taken.

        A look asks what the devices compute; a lower bound and a played step cost as many as they
        take the time of. So a search takes about as long for many models, and longer for those of
        hundreds of operators or devices.
        """
        return self._spent >= self._budget

    def allow(self, looks: float) -> None:
        """So many looks may be taken from now on."""
        self._budget = self._spent + looks

    def limit(self, looks: float) -> None:
        """So many looks may be taken from now on, if so many are left."""
        self._budget = min(self._budget, self._spent + looks)

    def promising(self, drafts: Iterable[Draft], below_s: float) -> list[tuple[float, Draft]]:
        """The drafts whose steps may be shorter than a limit, in the order of their lower bounds.

        Args:
            drafts: with their stages in any order.
            below_s: the limit.

        Returns:
            The bounds, and the drafts with their stages in order; none when the budget ends.
        """
        found: dict[Draft, float] = {}
        for draft in drafts:
            if self.is_spent:
                return []
            self._spent += 1
            if self._least_devices > 1 and draft.num_devices < self._least_devices:
                continue
            if self._bounds.busiest_s(draft) * (1 - ROUNDING) >= below_s:
                continue
            stages = arranged(draft.stages, self.tables)
            if stages is None:
                continue
            able = draft._replace(stages=stages)
            if able not in found:
                least_s = self._least(able)
                if least_s < below_s:
                    found[able] = least_s
        return sorted(((s, draft) for draft, s in found.items()), key=lambda one: one[0])

    def _least(self, draft: Draft) -> float:
        found = self._least_s.get(draft)
        if found is None:
            self._spent += LOOKS_PER_BOUND
            least_s = self._bounds.least_s(draft, is_chain=self._is_chain)
            found = self._least_s[draft] = least_s * (1 - ROUNDING)
        return found

    def step_s(self, draft: Draft, below_s: float) -> float:
        """Seconds of a draft's step; infinite where it does not fit, or is longer than a limit.

        What was too long for one limit is played again for a larger one.

        Args:
            draft: with its stages in order.
            below_s: the limit.
        """
        found = self._step_s.get(draft)
        if found is not None:
            return found
        if self._least_s.get(draft, 0.0) >= below_s:
            return math.inf
        self._spent += LOOKS_PER_BOUND + draft.num_actions // self._actions_per_look
        plan = plan_of(draft, self.tables, self.name, is_chain=self._is_chain)
        evaluation = evaluate_below(plan, self.tables.request, below_s, is_rough=self._is_rough)
        if evaluation is None:
            self._least_s[draft] = below_s
            return math.inf
        found = evaluation.step_s if evaluation.is_feasible else math.inf
        self._step_s[draft] = found
        self.show(evaluation)
        return found

    def show(self, found: PlanEvaluation) -> None:
        """Takes note of a plan; one that does not fit into memory is left out."""
        if found.is_feasible:
            self._found.setdefault(found.plan, found)
            if self.best is None or found.rank < self.best.rank:
                self.best = found

    def check(self, others: Iterable[PlanEvaluation]) -> float:
        """Plays the best plans, and others, to their ends, as from now on all that are looked at.

        Args:
            others: plans of other planners.

        Returns:
            The shortest step of the others that fit into memory.
        """
        best, near_s = self.found[:CHECKED], ROUGH * self.best_s
        self._is_rough, self._step_s, self._found, self.best = False, {}, {}, None
        others_s = math.inf
        for number, one in enumerate((*best, *others)):
            if one.step_s <= near_s:
                found = evaluate_plan(one.plan, self.tables.request)
                self.show(found)
                if number >= len(best) and found.is_feasible:
                    others_s = min(others_s, found.step_s)
        return others_s

    def settle(self, at_most_s: float) -> None:
        """Makes the plan with the fewest stages the best one, of those that are as good.

        Args:
            at_most_s: the longest step of these.
        """
        as_good = [one for one in self._found.values() if one.step_s <= at_most_s]
        self.best = min(as_good, key=lambda one: (len(one.stages), *one.rank), default=self.best)

    @property
    def found(self) -> list[PlanEvaluation]:
        """The plans so far, the best one first."""
        return sorted(self._found.values(), key=lambda one: one.rank)
