"""Random numbers: whole tensors get the same mask on all devices, parts different ones."""

from __future__ import annotations

import torch
from helpers.spmd_ranks import on_threads
from torch import Tensor, nn

from lightning_gpp.spmd.placement import PARTIAL, R_SAME, Placement, shard
from lightning_gpp.spmd.program import (
    Computation,
    Instruction,
    Move,
    SpmdProgram,
)
from lightning_gpp.spmd.run.export import export_forward
from lightning_gpp.spmd.run.interpreter import Interpreter

ROWS = 64


def dropped(placement: Placement, returned: Placement, seed: int) -> Tensor:
    """What two devices' dropout makes of ones, returned in a placement."""
    exported = export_forward(nn.Dropout(0.5), (torch.ones(ROWS, 8),))
    (operator,) = exported.graph.operators
    (name,) = exported.graph.outputs
    given = operator.inputs[0]
    instructions: list[Instruction] = [
        Move(given, None, placement),
        Computation(operator.name, (placement,), (placement,)),
    ]
    if returned != placement:
        instructions.append(Move(name, placement, returned))
    instructions.append(Move(name, returned, None))
    program = SpmdProgram((0.5, 0.5), {}, tuple(instructions))

    def run(group) -> Tensor:
        interpreter = Interpreter(exported.graph, program, group)
        inputs = {given: torch.ones(ROWS, 8)} if group.rank == 0 else None
        return interpreter.run({}, inputs, seed=seed).results[name]

    return on_threads(2, run)[0]


def test_parts_get_different_masks() -> None:
    whole = dropped(shard(0, ROWS), shard(0, ROWS), seed=3)
    assert set(whole.unique().tolist()) == {0.0, 2.0}
    assert not torch.equal(whole[: ROWS // 2], whole[ROWS // 2 :])


def test_copies_get_the_same_mask() -> None:
    """The upper half of one device's copy and the lower half of the other's are of one mask."""
    whole = dropped(R_SAME, R_SAME, seed=3)
    assert torch.equal(dropped(R_SAME, shard(0, ROWS), seed=3), whole)
    assert torch.equal(dropped(R_SAME, shard(1, 8), seed=3), whole)
    assert torch.equal(dropped(R_SAME, PARTIAL, seed=3), whole)


def test_another_call_draws_another_mask() -> None:
    assert not torch.equal(dropped(R_SAME, R_SAME, seed=3), dropped(R_SAME, R_SAME, seed=4))
