"""Parameters whose gradients are the same numbers do not share their memory."""

from __future__ import annotations

import torch
from helpers.random_programs import replicated_program
from helpers.spmd_ranks import on_threads
from helpers.spmd_training import backward, stored_parts
from torch import Tensor, nn

from lightning_gpp.spmd.run.export import export_forward
from lightning_gpp.spmd.run.interpreter import Interpreter


class Sums(nn.Module):
    """Parameters that are viewed and added."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(4, 3))
        self.b = nn.Parameter(torch.randn(12))
        self.c = nn.Parameter(torch.randn(12))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + (self.a + self.b.view(4, 3) + self.c.view(4, 3)))


def squares(y: Tensor) -> Tensor:
    return (y * y).sum()


def test_gradients_can_be_scaled_one_by_one() -> None:
    module, batch = Sums(), (torch.randn(4, 3),)
    exported = export_forward(module, batch)
    program = replicated_program(exported.graph, 1)

    def run(group):
        stored = stored_parts(module, exported, program, 0)
        interpreter = Interpreter(exported.graph, program, group)
        inputs = exported.form.inputs(batch, {})
        backward(interpreter.run(stored, inputs), exported, squares, 0)
        for name in "abc":
            stored[name].grad.mul_(2)
        return [stored[name].grad.reshape(-1) for name in "abc"]

    squares(module(*batch)).backward()
    (gradients,) = on_threads(1, run)
    for gradient in gradients:
        torch.testing.assert_close(gradient, 2 * module.c.grad)
