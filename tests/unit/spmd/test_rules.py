"""Every rule of the theory does on unequal parts what it claims, forwards and backwards.

An operator is called with random tensors, once as a whole, and for every rule on the parts that
three devices would have; what they make has to lie as the rule says, and so do the gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.spmd_graphs import Exported, call, export_graph
from helpers.spmd_modules import cases
from torch import Tensor

from lightning_gpp.spmd.operator_graph import SpmdOperator, SpmdValue
from lightning_gpp.spmd.placement import PARTIAL, Placement, units_per_device
from lightning_gpp.spmd.program import Option
from lightning_gpp.spmd.rules.table import SPECS
from lightning_gpp.spmd.rules.theory import Rule, Theory

SHARES = (0.2, 0.5, 0.3)


def parts(tensor: Tensor, placement: Placement) -> list[Tensor]:
    """What each device has of a tensor; summands are random."""
    if placement == PARTIAL and tensor.is_floating_point():
        noise = [torch.randn_like(tensor) for _ in SHARES[1:]]
        return [tensor - sum(noise), *noise]
    if not placement.is_shard:
        return [tensor for _ in SHARES]
    dim = placement.dim
    length = tensor.shape[dim]
    block, counts = placement.block(length), units_per_device(placement.units, SHARES)
    pieces = tensor.unflatten(dim, (placement.outer, placement.units, block)).split(counts, dim + 1)
    return [piece.flatten(dim, dim + 2) for piece in pieces]


def joined(pieces: list[Tensor], placement: Placement, like: Tensor) -> Tensor:
    """The tensor that the devices' parts are."""
    if placement == PARTIAL:
        return sum(pieces)
    if not placement.is_shard:
        for piece in pieces:
            torch.testing.assert_close(piece, pieces[0])
        return pieces[0]
    dim, outer = placement.dim, placement.outer
    split = [piece.unflatten(dim, (outer, piece.shape[dim] // outer)) for piece in pieces]
    return torch.cat(split, dim + 1).flatten(dim, dim + 1)


def local_call(operator: SpmdOperator, node: Any, rule: Rule, device: int, tensors, shapes):
    """An operator on a device, with what its option adds."""
    if rule.option is Option.VOCABULARY:
        start = sum(units_per_device(rule.inputs[0].units, SHARES)[:device])
        weight, index = tensors
        local = index - start
        mine = (local >= 0) & (local < len(weight))
        return [torch.nn.functional.embedding(local * mine, weight) * mine.unsqueeze(-1)]
    made = call(node, tensors, shapes)
    if rule.option is Option.MEAN:
        counts = units_per_device(rule.inputs[0].units, SHARES)
        made = [each * (counts[device] / sum(counts)) for each in made]
    return made


def local_shape(value: SpmdValue, placement: Placement, device: int) -> tuple[int, ...]:
    shape = list(value.shape)
    if placement.is_shard:
        counts = units_per_device(placement.units, SHARES)
        shape[placement.dim] = shape[placement.dim] * counts[device] // placement.units
    return tuple(shape)


def check(exported: Exported, operator: SpmdOperator, inputs: list[Tensor], rule: Rule) -> None:
    graph, node = exported.graph, exported.nodes[operator.name]
    outputs = [graph.value_of[name] for name in operator.outputs]
    whole = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in inputs]
    expected = call(node, whole, [value.shape for value in outputs])
    local_inputs = [
        [p.detach().clone().requires_grad_(t.is_floating_point()) for p in parts(t, placement)]
        for t, placement in zip(inputs, rule.inputs)
    ]
    made = [
        local_call(
            operator,
            node,
            rule,
            device,
            [local[device] for local in local_inputs],
            [local_shape(v, p, device) for v, p in zip(outputs, rule.outputs)],
        )
        for device in range(len(SHARES))
    ]
    for index, placement in enumerate(rule.outputs):
        found = joined([each[index] for each in made], placement, expected[index])
        torch.testing.assert_close(found, expected[index])
    flowing = [i for i, value in enumerate(outputs) if value.requires_grad]
    if not flowing:
        return
    cotangents = [torch.randn_like(expected[i]) for i in flowing]
    wanted_of = [i for i, name in enumerate(operator.inputs) if graph.value_of[name].requires_grad]
    wanted = torch.autograd.grad(
        [expected[i] for i in flowing], [whole[i] for i in wanted_of], cotangents, allow_unused=True
    )
    local_cotangents = [parts(g, rule.outputs[i].dual) for i, g in zip(flowing, cotangents)]
    found = [
        torch.autograd.grad(
            [made[device][i] for i in flowing],
            [local_inputs[i][device] for i in wanted_of],
            [cotangent[device] for cotangent in local_cotangents],
            allow_unused=True,
        )
        for device in range(len(SHARES))
    ]
    for place, (index, gradient) in enumerate(zip(wanted_of, wanted)):
        if gradient is None:
            continue
        pieces = [each[place] for each in found]
        gathered = joined(pieces, rule.inputs[index].dual, gradient)
        torch.testing.assert_close(gathered, gradient)


def run_whole(exported: Exported, module: torch.nn.Module, args: tuple[Tensor, ...]):
    """The operators with the tensors that they read."""
    graph = exported.graph
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    names = [v.name for v in graph.values if v.source.value == "input"]
    values = {**{n: t.detach() for n, t in named.items()}, **dict(zip(names, args))}
    for name, tensor in exported.program.constants.items():
        values[name] = tensor
    for signature in exported.program.graph_signature.inputs_to_lifted_tensor_constants.items():
        values[signature[0]] = exported.program.constants[signature[1]]
    for operator in graph.operators:
        inputs = [values[name] for name in operator.inputs]
        shapes = [graph.value_of[name].shape for name in operator.outputs]
        yield operator, inputs
        with torch.no_grad():
            made = call(exported.nodes[operator.name], inputs, shapes)
        values.update(zip(operator.outputs, made))


@pytest.mark.parametrize("name", list(cases()))
def test_every_rule_is_sound(name: str) -> None:
    module, args = cases()[name]
    exported = export_graph(module, *args)
    theory = Theory(exported.graph, len(SHARES))
    unknown = {op.kind for op in exported.graph.operators if op.name not in theory.specs}
    assert unknown <= {"arange", "zeros", "cross_entropy_loss"}
    count = 0
    for operator, inputs in run_whole(exported, module, args):
        for rule in theory.rules(operator):
            try:
                check(exported, operator, inputs, rule)
            except Exception as error:
                raise AssertionError(f"{operator.kind} {operator.name}: {rule}: {error}") from error
            count += 1
    assert count > 50


def test_the_modules_have_most_kinds_of_the_table() -> None:
    met = set()
    for module, args in cases().values():
        met |= {operator.kind for operator in export_graph(module, *args).graph.operators}
    assert len(met & set(SPECS)) > 50
