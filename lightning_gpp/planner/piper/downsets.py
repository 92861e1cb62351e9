"""The downsets of a graph: sets of operators that hold all readers of their members.

Piper (NeurIPS 2021, section 4) builds pipelines from the back: the last stages together are a
downset, and a stage is the difference of two. A chain of ``n`` operators has ``n + 1`` downsets,
``b`` parallel chains have ``(n + 1)^b``: the number explodes with branches, which is the published
limit of that planner.
"""

from __future__ import annotations

from collections.abc import Sequence

DOWNSETS_LIMIT = 40_000
"""The limit of the published code (``IDEALS_LIMIT``)."""


def downsets(readers: Sequence[Sequence[int]], limit: int = DOWNSETS_LIMIT) -> list[int]:
    """All downsets as bit masks, smaller ones first.

    Args:
        readers: operator -> operators that read from it.
        limit: how many there may be.

    Raises:
        ValueError: there are more.

    >>> [bin(found) for found in downsets([(1,), (2,), ()])]  # 0 -> 1 -> 2
    ['0b0', '0b100', '0b110', '0b111']
    """
    needs = [sum(1 << reader for reader in found) for found in readers]
    found = [0]
    newest = [0]
    while newest:
        larger = dict.fromkeys(
            downset | 1 << operator
            for downset in newest
            for operator, need in enumerate(needs)
            if not downset >> operator & 1 and not need & ~downset
        )
        found += larger
        newest = list(larger)
        if len(found) > limit:
            raise ValueError(
                f"Piper searches all downsets of the model, and after those of {_size(newest)} of "
                f"its {len(readers)} operators there are {len(found)} already, more than its "
                f"limit of {limit}: their number multiplies with every parallel branch. Use the "
                "planner graphpipe, or fewer and larger operators"
            )
    return found


def _size(masks: Sequence[int]) -> int:
    return masks[0].bit_count() if masks else 0
