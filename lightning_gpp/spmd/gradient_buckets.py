"""Which gradients wait for others, to be summed in one message."""

from __future__ import annotations

from lightning_gpp.spmd.operator_graph import SpmdGraph, SpmdValue, ValueSource
from lightning_gpp.spmd.placement import R_SAME, R_SUMMED
from lightning_gpp.spmd.program import Conversion, Instruction, Method, SpmdProgram


def is_summed_later(value: SpmdValue, conversion: Conversion) -> bool:
    """Whether a conversion is of a whole parameter, of whose gradient devices have summands."""
    return (
        value.source is ValueSource.PARAMETER
        and value.requires_grad
        and conversion.source == R_SAME
        and conversion.target == R_SUMMED
        and conversion.backward_method is Method.DIRECT
    )


def bytes_in_bucket(program: SpmdProgram, instruction: Instruction, graph: SpmdGraph) -> int:
    """Bytes of the gradient that an instruction has summed with others backwards; 0 for none."""
    if not isinstance(instruction, Conversion) or program.stored(instruction.value) != R_SAME:
        return 0
    value = graph.value_of[instruction.value]
    return value.size_bytes if is_summed_later(value, instruction) else 0
