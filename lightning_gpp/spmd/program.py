"""An SPMD program as data: the instructions that every device runs, in order.

The devices run the same list of instructions, each on its own part. A tensor may be had in several
placements at once (gathered for one reader only), so instructions name a value *and* a placement.

Parameters and buffers are there from the start in their *storage* placement, ``R=`` or a shard:
optimizer state lies alike. Everything else about them is a conversion: data parallelism reads
``R= -> R`` (backwards an all-reduce of the gradient), ZeRO ``S -> R`` (all-gather, backwards
reduce-scatter), the bias of a row-parallel layer ``R= -> P``.

The forward's arguments lie at rank 0 and its results go there: the user's step runs there. So the
gradient of a result is whole at rank 0 and zero elsewhere, which is a summand on each: it makes
``R`` free to return.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from lightning_gpp.common.strict_json import JsonFormat, to_data
from lightning_gpp.spmd.operator_graph import SpmdGraph, SpmdValue, ValueSource
from lightning_gpp.spmd.placement import R_SAME, R_SUMMED, Placement, check_shares

FORMAT = JsonFormat("lightning_gpp.spmd_program", version=6)


class Option(Enum):
    """What an operator does on a device besides the call on local tensors.

    Attributes:
        PLAIN: nothing. Sizes among its attributes that name a sharded dimension (of a view, an
            expand) are the local ones, which follow from the placements of the outputs.
        MEAN: a mean over a sharded dimension: a device's mean of its own elements times their part
            of all is its summand.
        VOCABULARY: look-ups in a table of which a device has some rows: its summand is zeros
            where the index is of another device's row.
    """

    PLAIN = "plain"
    MEAN = "mean"
    VOCABULARY = "vocabulary"


@dataclass(frozen=True, slots=True)
class Move:
    """Converts a value to another placement; the old one stays for its other readers.

    An argument of the forward comes from rank 0, to all or each its shard; a result goes there.

    ===========  ==============================  =================================
    from → to    forwards                        backwards
    ===========  ==============================  =================================
    S → R        all-gather                      reduce-scatter
    S → R=       all-gather                      each cuts its part
    P → S        reduce-scatter                  all-gather
    P → R=       all-reduce                      nothing: the gradient is whole
    P → R        all-reduce                      all-reduce
    R → S        each cuts its part              pads with zeros to a summand
    R= → S       each cuts its part              all-gather
    R= → R       nothing                         all-reduce
    R → R=       nothing                         device 0 keeps it, zeros elsewhere
    R → P        device 0 keeps it               nothing: the gradient is whole, but
                                                 only device 0's summand counts
    R= → P       device 0 keeps it, zeros        nothing: the gradient is whole
                 elsewhere
    S → P        pads with zeros to a summand    each cuts its part
    S → S        all-to-all                      all-to-all
    0 → R=, R    broadcast                       nothing; sum to rank 0
    0 → S        scatter                         gather
    R=, R → 0    nothing                         broadcast; nothing
    S → 0        gather                          scatter
    P → 0        sum to rank 0                   broadcast
    ===========  ==============================  =================================

    ``R → P`` backwards: the gradient that arrives is whole on every device, a summand of ``R``'s
    has to sum to it: device 0 keeps it, the others have zeros.

    Attributes:
        value: its name.
        source: a placement in which it is there; None is rank 0 (0 in the table), which has all.
        target: the placement that it is wanted in; likewise.
    """

    value: str
    source: Placement | None
    target: Placement | None


@dataclass(frozen=True, slots=True)
class Computation:
    """An operator runs on the local parts of its inputs.

    Attributes:
        operator: its name.
        inputs: placement of each of its inputs, in their order; all are there.
        outputs: placement of each of its outputs.
        option: what it does beyond the plain call.
    """

    operator: str
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    option: Option = Option.PLAIN


Instruction: TypeAlias = Move | Computation


@dataclass(frozen=True, slots=True)
class SpmdProgram:
    """The instructions of all devices for one forward, and its backward.

    Attributes:
        shares: the part of each device, above 0, summing to 1.
        storage: parameter or buffer -> the placement it is kept in, ``R=`` or a shard.
        instructions: in order.
        name: what it is (``"hap"``, ``"DP-EV"``), for people.

    Raises:
        ValueError: the shares do not sum to 1; a placement leaves a device without; or a storage
            is neither ``R=`` nor a shard.
    """

    shares: tuple[float, ...]
    storage: Mapping[str, Placement] = field(hash=False)
    instructions: tuple[Instruction, ...]
    name: str = ""

    def __post_init__(self) -> None:
        check_shares(self.shares)
        for name, placement in self.storage.items():
            if not (placement.is_shard or str(placement) == "R="):
                raise ValueError(f"storage of {name!r}: expected R= or a shard, got {placement}")
        for placement in {*self.placements}:
            if placement.is_shard and (placement.units or 0) < self.num_devices:
                raise ValueError(
                    f"{placement} has fewer units than the {self.num_devices} devices, each of "
                    "which needs one"
                )

    @property
    def num_devices(self) -> int:
        """Number of devices that run it."""
        return len(self.shares)

    def stored(self, name: str) -> Placement:
        """The placement that a parameter or buffer is kept in: whole where nothing is said."""
        return self.storage.get(name, R_SAME)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """All placements in it, with repetition."""
        found = list(self.storage.values())
        for each in self.instructions:
            if isinstance(each, Computation):
                found += [*each.inputs, *each.outputs]
            else:
                found += [place for place in (each.source, each.target) if place]
        return tuple(found)


def spmd_program_to_json(program: SpmdProgram) -> str:
    """The program as a JSON document, which people and scripts read."""
    return FORMAT.dumps(to_data(program))


def is_summed_later(value: SpmdValue, source: Placement | None, target: Placement | None) -> bool:
    """Whether a whole parameter is read so that devices have summands of its gradient."""
    is_trained = value.source is ValueSource.PARAMETER and value.requires_grad
    return is_trained and source == R_SAME and target == R_SUMMED


def bytes_in_bucket(program: SpmdProgram, instruction: Instruction, graph: SpmdGraph) -> int:
    """Bytes of the gradient that an instruction has summed with others backwards; 0 for none."""
    if isinstance(instruction, Computation) or program.stored(instruction.value) != R_SAME:
        return 0
    value = graph.value_of[instruction.value]
    is_later = is_summed_later(value, instruction.source, instruction.target)
    return value.size_bytes if is_later else 0
