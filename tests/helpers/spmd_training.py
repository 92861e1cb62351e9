"""Training by an SPMD program on threads, beside the same on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from helpers.spmd_ranks import on_threads
from helpers.threads.collectives import ThreadCollectives
from lightning_gpp.spmd.operator_graph import ValueSource
from lightning_gpp.spmd.program import SpmdProgram
from lightning_gpp.spmd.run.export import ExportedForward
from lightning_gpp.spmd.run.interpreter import Interpreter, ProgramRun
from lightning_gpp.spmd.run.moves import Shards

Optimize = Callable[[list[Tensor]], torch.optim.Optimizer]


def adam(parameters: list[Tensor]) -> torch.optim.Optimizer:
    """Adam; where a gradient is rounding alone (a bias in front of a norm), so is its step."""
    return torch.optim.Adam(parameters, lr=1e-2, eps=1e-4)


def train_whole(
    module: nn.Module,
    batches: Sequence[tuple[Tensor, ...]],
    loss: Callable[[Any], Tensor],
    optimize: Optimize = adam,
) -> dict[str, Tensor]:
    """The state of a copy of a module after some steps on one device."""
    module = copy.deepcopy(module)
    optimizer = optimize([p for p in module.parameters() if p.requires_grad])
    for batch in batches:
        optimizer.zero_grad()
        loss(module(*batch)).backward()
        optimizer.step()
    return {name: tensor.detach() for name, tensor in module.state_dict().items()}


def train_divided(
    module: nn.Module,
    exported: ExportedForward,
    program: SpmdProgram,
    batches: Sequence[tuple[Tensor, ...]],
    loss: Callable[[Any], Tensor],
    optimize: Optimize = adam,
) -> dict[str, Tensor]:
    """The same by a program, joined from the parts of all devices."""
    shards = Shards(program.shares)

    def run(group: ThreadCollectives) -> dict[str, Tensor]:
        stored = stored_parts(module, exported, program, group.rank)
        interpreter = Interpreter(exported.graph, program, group)
        trained = [part for part in stored.values() if part.requires_grad]
        optimizer = optimize(trained)
        for batch in batches:
            optimizer.zero_grad()
            inputs = exported.form.inputs(batch, {}) if group.rank == 0 else None
            backward(interpreter.run(stored, inputs), exported, loss, group.rank)
            optimizer.step()
        return {name: part.detach() for name, part in stored.items()}

    found = on_threads(program.num_devices, run)
    names = found[0]
    return {
        name: shards.join([parts[name] for parts in found], program.storage[name])
        if name in program.storage and program.storage[name].is_shard
        else _same([parts[name] for parts in found], name)
        for name in names
    }


def stored_parts(
    module: nn.Module, exported: ExportedForward, program: SpmdProgram, rank: int
) -> dict[str, Tensor]:
    """What a device stores of a module's parameters, buffers and constants."""
    shards, found = Shards(program.shares), {}
    tensors = dict(exported.constants) | dict(module.named_buffers())
    tensors |= dict(module.named_parameters())
    for source in (ValueSource.PARAMETER, ValueSource.BUFFER):
        for value in exported.graph.of_source(source):
            tensor = tensors[value.name]
            part = tensor.detach()
            placement = program.storage.get(value.name)
            if placement is not None and placement.is_shard:
                part = shards.cut(part, placement, rank)
            found[value.name] = part.clone().requires_grad_(tensor.requires_grad)
    return found


def backward(
    run: ProgramRun, exported: ExportedForward, loss: Callable[[Any], Tensor], rank: int
) -> None:
    """Rank 0 has the loss; the others go backward from nothing."""
    reached = [name for name, result in run.results.items() if result.requires_grad]
    gradients: dict[str, Tensor] = {}
    if rank == 0:
        leaves = {
            name: result.detach().requires_grad_(result.requires_grad)
            for name, result in run.results.items()
        }
        loss(exported.form.result([leaves[name] for name in exported.graph.outputs])).backward()
        for name in reached:
            leaf = leaves[name]
            gradients[name] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    run.backward(reached, gradients)


def _same(parts: Sequence[Tensor], name: str) -> Tensor:
    for part in parts[1:]:
        torch.testing.assert_close(part, parts[0], rtol=1e-10, atol=1e-10, msg=name)
    return parts[0]
