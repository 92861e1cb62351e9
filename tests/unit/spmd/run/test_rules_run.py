"""Every rule of the theory, run by the interpreter on unequal parts, gives what it claims.

A graph of one operator: its tensors are arguments that come from rank 0, are converted to what the
rule asks for, and what it makes goes back: a wrong placement shows in a value or a gradient.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from helpers.spmd_modules import cases
from helpers.spmd_ranks import on_threads, random_shares
from torch import Tensor

from lightning_gpp.spmd.operator_graph import SpmdGraph, SpmdOperator, ValueSource
from lightning_gpp.spmd.placement import PARTIAL, R_SAME, Placement
from lightning_gpp.spmd.program import (
    Computation,
    Instruction,
    Move,
    SpmdProgram,
)
from lightning_gpp.spmd.rules.theory import Rule, Theory
from lightning_gpp.spmd.run.export import ExportedForward, export_forward
from lightning_gpp.spmd.run.interpreter import Interpreter
from lightning_gpp.spmd.run.operator_calls import call, overload, tensors_of


class ViewedTable(torch.nn.Module):
    """A table whose rows are also seen as three parts, of each of which devices may have some."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(12, 4, dtype=torch.float64))

    def forward(self, tokens: Tensor) -> Tensor:
        rows = torch.nn.functional.embedding(tokens, self.table)
        return rows * self.table.view(3, 4, 4).sum((0, 1))


CASES = {**cases(), "ViewedTable": (ViewedTable(), (torch.randint(0, 12, (5, 3)),))}


def alone(graph: SpmdGraph, operator: SpmdOperator) -> SpmdGraph:
    """An operator as a graph of its own, its inputs arguments."""
    inputs = [
        replace(graph.value_of[name], source=ValueSource.INPUT)
        for name in dict.fromkeys(operator.inputs)
    ]
    outputs = [graph.value_of[name] for name in operator.outputs]
    return SpmdGraph((*inputs, *outputs), (operator,), operator.outputs)


def program_of(graph: SpmdGraph, rule: Rule, shares: tuple[float, ...]) -> SpmdProgram:
    """Only the rule, and what it needs."""
    (operator,) = graph.operators
    there: set[tuple[str, Placement]] = set()
    instructions: list[Instruction] = []
    for value in graph.of_source(ValueSource.INPUT):
        instructions.append(Move(value.name, None, R_SAME))
        there.add((value.name, R_SAME))
    for name, placement in zip(operator.inputs, rule.inputs, strict=True):
        if (name, placement) not in there:
            instructions.append(Move(name, R_SAME, placement))
            there.add((name, placement))
    made = rule.inputs, rule.outputs, rule.option
    instructions.append(Computation(operator.name, *made))
    instructions += [
        Move(name, placement, None)
        for name, placement in zip(operator.outputs, rule.outputs, strict=True)
    ]
    return SpmdProgram(shares, {}, tuple(instructions))


def drawn(graph: SpmdGraph, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Random numbers, away from 0 and 1, for the inputs of an operator; indices as they are."""
    return {
        value.name: torch.rand(value.shape, dtype=torch.float64) * 0.6 + 0.2
        if value.spec.is_differentiable
        else values[value.name]
        for value in graph.of_source(ValueSource.INPUT)
    }


def called(operator: SpmdOperator, tensors: list[Tensor]) -> list[Tensor]:
    """What an operator makes of whole tensors."""
    function = overload(operator.target)
    is_recorded = operator.is_recorded
    return [*tensors_of(call(function, operator.attributes, tensors, is_recorded=is_recorded))]


def values_of(exported: ExportedForward, module: torch.nn.Module, args) -> dict[str, Tensor]:
    """All values of a forward on one device."""
    values = dict(exported.constants) | dict(module.named_buffers())
    values |= dict(module.named_parameters()) | exported.form.inputs(args, {})
    for operator in exported.graph.operators:
        made = called(operator, [values[name] for name in operator.inputs])
        values.update(zip(operator.outputs, made, strict=True))
    return {name: value.detach() for name, value in values.items()}


def check(
    exported: ExportedForward,
    operator: SpmdOperator,
    rule: Rule,
    values: dict[str, Tensor],
    shares: tuple[float, ...],
) -> None:
    graph = alone(exported.graph, operator)
    leaves = {
        name: tensor.clone().requires_grad_(graph.value_of[name].requires_grad)
        for name, tensor in drawn(graph, values).items()
    }
    made = called(operator, [leaves[name] for name in operator.inputs])
    gradients = [torch.randn_like(t) if t.requires_grad else None for t in made]
    reached = [(t, g) for t, g in zip(made, gradients, strict=True) if g is not None]
    if reached:
        torch.autograd.backward(*zip(*reached, strict=True))
    program = program_of(graph, rule, shares)
    given = {n: t.detach().clone().requires_grad_(t.requires_grad) for n, t in leaves.items()}

    def run(group):
        interpreter = Interpreter(graph, program, group)
        run = interpreter.run({}, given if group.rank == 0 else None)
        reached = [name for name, result in run.results.items() if result.requires_grad]
        back = dict(zip(graph.outputs, gradients, strict=True)) if group.rank == 0 else {}
        run.backward(reached, back)
        return [run.results[name].detach() for name in graph.outputs]

    found = on_threads(len(shares), run)[0]
    for one, other in zip(found, made, strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-9, atol=1e-9, msg=str(rule))
    for name, leaf in leaves.items():
        if leaf.grad is not None:
            torch.testing.assert_close(
                given[name].grad, leaf.grad, rtol=1e-9, atol=1e-9, msg=f"{rule}: {name}"
            )


@pytest.mark.parametrize("num_devices", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_every_rule(name: str, num_devices: int) -> None:
    module, args = CASES[name]
    exported = export_forward(module, args)
    values = values_of(exported, module, args)
    theory = Theory(exported.graph, num_devices)
    draw = random.Random(f"{name} {num_devices}")
    num_rules = 0
    for operator in exported.graph.operators:
        for rule in theory.rules(operator):
            wholes = zip(operator.inputs, rule.inputs, strict=True)
            if any(
                p == PARTIAL and not exported.graph.value_of[n].spec.is_differentiable
                for n, p in wholes
            ):
                continue  # whole numbers have no random summands
            check(exported, operator, rule, values, random_shares(num_devices, draw))
            num_rules += 1
    assert num_rules > 2 * len(exported.graph.operators)
