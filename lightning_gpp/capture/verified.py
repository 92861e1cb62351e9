"""What one process found when it captured a model, so that others need not check theirs."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_gpp.capture.operators.cuts import Cuts
from lightning_gpp.capture.operators.fingerprint import NodeContent
from lightning_gpp.capture.tracing.reads import Read


@dataclass(frozen=True, slots=True)
class Verified:
    """The trace that passed all checks, as plain data: how to trace the same again.

    Attributes:
        num_samples: of the inputs that it was captured with.
        method: how it was captured (``"blocks"`` or ``"concrete"``).
        open_stacks: whether transformer stacks were looked into.
        whole: names of modules whose types stay whole because their own Python decides.
        nodes: of the first trace in training, in this order.
        dropped: names of guards that were taken out, in this order.
        cuts: how values can be cut.
        steady: names of the buffers that forward changes alike whatever its arguments are.
        reads: plain attributes that forward read and that must not change.
        is_random: whether forward draws random numbers from torch in training mode.
    """

    num_samples: int
    method: str
    open_stacks: bool
    whole: tuple[str, ...] = ()
    nodes: tuple[NodeContent, ...] = ()
    dropped: tuple[str, ...] = ()
    cuts: Cuts = field(default_factory=Cuts)
    steady: frozenset[str] = frozenset()
    reads: tuple[Read, ...] = ()
    is_random: bool = False
