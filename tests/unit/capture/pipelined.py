"""Runs a captured model stage by stage, as a pipeline does, to compare it with the module."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpp.capture import CapturedModel, capture
from lightning_gpp.capture.checks.check import Result, compare
from lightning_gpp.capture.values.structure import flatten
from lightning_gpp.graph import ModelGraph

Stages = Sequence[Sequence[str]]


def data(*shape: int, grad: bool = False) -> Tensor:
    """Normal random numbers."""
    return torch.randn(*shape, requires_grad=grad)


def run_whole(captured: CapturedModel, *args: Any, **kwargs: Any) -> Any:
    """What the captured graph returns, run as one stage in the mode of its module."""
    inputs, graph = captured.inputs(args, kwargs), captured.graph
    stage = captured.stage([o.name for o in graph], list(inputs), graph.outputs)
    values = stage(list(inputs.values()), training=captured.module.training)
    return captured.output(dict(zip(graph.outputs, values, strict=True)))


def assert_same_on(captured: CapturedModel, *args: Any, **kwargs: Any) -> None:
    """Compares the captured graph with the module on other arguments than those of the capture."""
    torch.testing.assert_close(
        run_whole(captured, *args, **kwargs), captured.module(*args, **kwargs)
    )


def random_stages(graph: ModelGraph, rng: random.Random, *, in_order: bool = False) -> Stages:
    """A random division into stages: a random topological order, cut at random places."""
    order = [operator.name for operator in graph] if in_order else _random_order(graph, rng)
    num_cuts = rng.randint(0, len(order) - 1)
    cuts = [0, *sorted(rng.sample(range(1, len(order)), num_cuts)), len(order)]
    return [order[start:end] for start, end in zip(cuts, cuts[1:], strict=False)]


def run_stages(
    captured: CapturedModel,
    stages: Stages,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Result:
    """Forward through all stages, then backward through them in reverse, detached in between."""
    graph, module = captured.graph, captured.module
    inputs = captured.inputs(args, kwargs)
    values: dict[str, Any] = dict(inputs)
    gradients: dict[int, Tensor] = {}
    tape = []
    for operators in stages:
        names_in, names_out = _border(graph, stages, operators)
        stage = captured.stage(operators, names_in, names_out)
        received = [_cut(values[name]) for name in names_in]
        made = stage(received, training=module.training)
        tape.append(([values[name] for name in names_in], received, made))
        values |= dict(zip(names_out, made, strict=True))
    output = captured.output({name: values[name] for name in graph.outputs})
    for leaf, weight in _loss_weights(output):
        _accumulate(gradients, leaf, weight)
    found: dict[int, Tensor] = {}
    sources = dict(module.named_parameters())
    for sent, received, made in reversed(tape):
        # two values may be one tensor; its gradient is in the table once
        different = {id(leaf): leaf for leaf in _tensors(made) if leaf.requires_grad}
        roots = [leaf for key, leaf in different.items() if key in gradients]
        wanted = [leaf for leaf in _tensors(received) if leaf.requires_grad]
        leaves = [item for item in [*wanted, *sources.values()] if item.requires_grad]
        if not roots or not leaves:
            continue
        result = torch.autograd.grad(
            roots, leaves, [gradients[id(root)] for root in roots], allow_unused=True
        )
        of_leaf = {id(leaf): gradient for leaf, gradient in zip(leaves, result, strict=True)}
        for source in sources.values():
            _accumulate(found, source, of_leaf.get(id(source)))
        for origin, leaf in zip(_tensors(sent), _tensors(received), strict=True):
            _accumulate(gradients, origin, of_leaf.get(id(leaf)))
    wanted_names = {name: item for name, item in sources.items() if item.requires_grad}
    by_name = {name: found.get(id(item)) for name, item in wanted_names.items()}
    by_name |= {name: gradients.get(id(t)) for name, t in inputs.items() if t.requires_grad}
    return Result(_detached(output), by_name)


def run_module(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Result:
    """The same of the module itself."""
    inputs = [leaf for leaf in _tensors([list(args), dict(kwargs)]) if leaf.requires_grad]
    output = module(*args, **kwargs)
    pairs = [(leaf, weight) for leaf, weight in _loss_weights(output) if leaf.requires_grad]
    sources = {name: item for name, item in module.named_parameters() if item.requires_grad}
    torch.autograd.backward([leaf for leaf, _ in pairs], [weight for _, weight in pairs])
    by_name = {name: item.grad for name, item in sources.items()}
    for item in [*sources.values(), *inputs]:
        item.grad = None
    return Result(_detached(output), by_name)


def assert_partitions_exact(
    module: nn.Module,
    *args: Any,
    num_partitions: int = 6,
    in_order: bool = False,
    training: bool | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> CapturedModel:
    """Captures ``module`` and compares random partitions with it in both modes.

    ``in_order`` keeps the operators in forward's order, so that random numbers are drawn alike.
    """
    captured = capture(module, args, kwargs, **(options or {}))
    rng = random.Random(seed)
    for mode in (True, False) if training is None else (training,):
        module.train(mode)
        for _ in range(num_partitions):
            stages = random_stages(captured.graph, rng, in_order=in_order)
            state = copy.deepcopy(module.state_dict())
            torch.manual_seed(seed)
            expected = run_module(module, args, kwargs)
            expected_state = copy.deepcopy(module.state_dict())
            module.load_state_dict(state)
            torch.manual_seed(seed)
            got = run_stages(captured, stages, args, kwargs)
            kept = {name: got.gradients[name] for name in expected.gradients}
            what = f"training={mode}, stages={stages}"
            compare(_zeroed(expected), _zeroed(Result(got.output, kept)), what)
            for name, buffer in module.state_dict().items():
                assert torch.equal(buffer, expected_state[name]), (name, what)
            module.load_state_dict(state)
    return captured


def _random_order(graph: ModelGraph, rng: random.Random) -> list[str]:
    waiting = {name: set(before) for name, before in graph.predecessors.items()}
    order: list[str] = []
    while waiting:
        name = rng.choice(sorted(name for name, before in waiting.items() if not before))
        order.append(name)
        del waiting[name]
        for before in waiting.values():
            before.discard(name)
    return order


def _border(
    graph: ModelGraph, stages: Stages, operators: Sequence[str]
) -> tuple[list[str], list[str]]:
    here = [graph.operator[name] for name in operators]
    made = [value.name for operator in here for value in operator.outputs]
    read = dict.fromkeys(name for operator in here for name in operator.inputs)
    others = [graph.operator[n] for stage in stages if stage is not operators for n in stage]
    wanted = {name for operator in others for name in operator.inputs} | set(graph.outputs)
    return [name for name in read if name not in made], [n for n in made if n in wanted]


def _cut(value: Any) -> Any:
    """What arrives on the other side: equal tensors, without the graph and the memory."""
    leaves, structure = flatten(value)
    return structure.unflatten([_cut_tensor(leaf) for leaf in leaves])


def _cut_tensor(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    copied = leaf.detach().clone()
    return copied.requires_grad_(leaf.requires_grad)


def _loss_weights(output: Any) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (leaf, torch.rand(leaf.shape, generator=generator, dtype=torch.float64).to(leaf))
        for leaf in _tensors(output)
        if leaf.is_floating_point()
    ]


def _accumulate(table: dict[int, Tensor], key: Tensor, gradient: Tensor | None) -> None:
    if gradient is not None:
        table[id(key)] = table[id(key)] + gradient if id(key) in table else gradient


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]


def _detached(value: Any) -> Any:
    leaves, structure = flatten(value)
    return structure.unflatten(
        [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    )


def _zeroed(result: Result) -> Result:
    """A gradient that is zero and one that does not exist are the same here."""
    return Result(
        result.output,
        {
            name: None if gradient is None or not gradient.any() else gradient
            for name, gradient in result.gradients.items()
        },
    )
