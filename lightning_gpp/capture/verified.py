"""What one process found when it captured a model, so that others need not check theirs."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gpp.capture.operators.cuts import Cuts
from lightning_gpp.capture.operators.fingerprint import NodeContent
from lightning_gpp.capture.tracing.reads import Read


@dataclass(frozen=True, slots=True)
class Verified:
    """The trace that passed all checks, as plain data: how to trace the same again.

    Attributes:
        method: how it was captured.
        open_stacks: whether transformer stacks were looked into.
        whole: names of modules whose types stay whole because their own Python decides.
        nodes: of the first trace in training, in this order.
        dropped: names of guards that were taken out, in this order.
        cuts: how values can be cut.
        steady: as in :class:`~lightning_gpp.capture.model.CapturedModel`, as the rest.
        reads: likewise.
        is_random: likewise.
    """

    method: str
    open_stacks: bool
    whole: tuple[str, ...]
    nodes: tuple[NodeContent, ...]
    dropped: tuple[str, ...]
    cuts: Cuts
    steady: frozenset[str] = frozenset()
    reads: tuple[Read, ...] = ()
    is_random: bool = False
