"""Calls of operators as the graph that planners read: kinds, attributes, sizes, work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_gpp.graph.tensor_spec import TensorSpec
from lightning_gpp.spmd.operator_graph import SpmdGraph, SpmdOperator, SpmdValue, ValueSource
from lightning_gpp.spmd.run.operator_calls import Operand, OperatorCall

Made = Sequence[tuple[str, Tensor]]


def graph_of_calls(
    sources: Mapping[str, tuple[str, Tensor]],
    calls: Sequence[OperatorCall],
    reads: Mapping[str, Sequence[str]],
    makes: Mapping[str, Made],
    modules: Mapping[str, str],
    outputs: Sequence[str],
    trained: Set[str],
) -> SpmdGraph:
    """The graph of some calls. They run once on tensors without values.

    Args:
        sources: parameters, buffers and arguments: kind of source and a tensor like it.
        calls: in order.
        reads: names of the tensors that a call reads.
        makes: likewise, that it makes.
        modules: that make the calls.
        outputs: of the forward.
        trained: parameters and arguments that need a gradient.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        tensors = {
            name: torch.empty(like.shape, dtype=like.dtype).requires_grad_(name in trained)
            for name, (_, like) in sources.items()
        }
        values = [
            _value(name, tensors[name], ValueSource(source))
            for name, (source, _) in sources.items()
        ]
        operators = []
        for call in calls:
            given = [tensors[name] for name in reads[call.name]]
            with torch.enable_grad(), FlopCounterMode(display=False) as counter:
                made = call.run(given, on_device(call.arguments, torch.device("cpu")))
            names = [name for name, _ in makes[call.name]]
            tensors.update(zip(names, made, strict=True))
            values += [_value(n, t, ValueSource.OPERATOR) for n, t in zip(names, made, strict=True)]
            flops = float(counter.get_total_flops()) or float(sum(t.numel() for t in made))
            operators.append(_operator(call, reads[call.name], names, flops, modules[call.name]))
    return SpmdGraph(tuple(values), tuple(operators), tuple(outputs))


def on_device(arguments: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Arguments with a device in the place of that of the export."""
    return {
        name: device if isinstance(value, torch.device) else value
        for name, value in arguments.items()
    }


def _value(name: str, tensor: Tensor, source: ValueSource) -> SpmdValue:
    dtype = str(tensor.dtype).removeprefix("torch.")
    spec = TensorSpec(tuple(map(int, tensor.shape)), dtype)
    return SpmdValue(name, spec, source, tensor.requires_grad)


def _operator(
    call: OperatorCall, reads: Sequence[str], makes: Sequence[str], flops: float, module: str
) -> SpmdOperator:
    namespace, kind, _ = call.target.split(".")
    names: dict[int, str] = {}
    attributes: dict[str, object] = {}
    for name, given in call.arguments.items():
        if isinstance(given, Operand):
            names[given.index] = name
        elif isinstance(given, list) and any(isinstance(each, Operand) for each in given):
            for place, each in enumerate(given):
                if isinstance(each, Operand):
                    names[each.index] = f"{name}[{place}]"
        else:
            attributes[name] = _plain(given)
    return SpmdOperator(
        name=call.name,
        kind=kind if namespace == "aten" else f"{namespace}.{kind}",
        inputs=tuple(reads),
        arguments=tuple(names[index] for index in range(len(reads))),
        outputs=tuple(makes),
        attributes=attributes,
        flops=flops,
        module=module,
    )


def _plain(value: Any) -> object:
    """An attribute as planners have it, who know no torch."""
    if isinstance(value, tuple | list):
        return tuple(_plain(each) for each in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value).removeprefix("torch.")
