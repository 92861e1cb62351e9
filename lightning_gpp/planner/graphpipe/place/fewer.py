"""Fewer stages where they do as well.

A climb takes every step that is shorter, if only by a thousandth, and so cuts stages more often
than is worth it: the judge is not that exact, and every stage has messages and an order to keep.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_gpp.planner.graphpipe.place.draft import Draft
from lightning_gpp.planner.graphpipe.place.drafted import draft_of
from lightning_gpp.planner.graphpipe.place.judged import DraftJudge
from lightning_gpp.planner.graphpipe.place.moves import joined


def merge_stages(judge: DraftJudge, at_most_s: float) -> None:
    """Merges stages of the best plan that have the same devices, and takes the fewest stages.

    Args:
        judge: knows the best plan, and takes note of others.
        at_most_s: the longest step that is as good.
    """
    judge.settle(at_most_s)
    draft = None if judge.best is None else draft_of(judge.best.plan, judge.tables)
    number = 0
    while draft is not None and number < len(draft.stages):
        found = next(_merged(draft, number, judge, at_most_s), None)
        if found is None:
            number += 1
        else:
            draft = found
    judge.settle(at_most_s)


def _merged(draft: Draft, first: int, judge: DraftJudge, at_most_s: float) -> Iterator[Draft]:
    """The drafts where one of the later stages is merged into a stage, with steps short enough."""
    for second in range(first + 1, len(draft.stages)):
        if draft.stages[first].devices == draft.stages[second].devices:
            for _, able in judge.promising(joined(draft, first, second), at_most_s):
                if judge.step_s(able, at_most_s) <= at_most_s:
                    yield able
