"""The places and the devices that a stage may have."""

from __future__ import annotations

from typing import NamedTuple

Interval = tuple[int, int]
"""Places of the units in a line, from the first up to (not including) the second."""


class Crew(NamedTuple):
    """The devices of a stage, and how it uses them.

    Attributes:
        num_replicas: how many devices, all of one kind.
        kind: their kind, as an index into the kinds of the cluster.
        multiple: its micro-batch, all replicas together, in units of the smallest one.
    """

    num_replicas: int
    kind: int
    multiple: int
