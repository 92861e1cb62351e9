"""Operator graphs of torch modules, exported on meta tensors, and calls of their operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils.flop_counter import FlopCounterMode

from lightning_gpp.graph import TensorSpec
from lightning_gpp.spmd.operator_graph import SpmdGraph, SpmdOperator, SpmdValue, ValueSource


@dataclass(frozen=True)
class Exported:
    """A graph and the nodes it was made of."""

    graph: SpmdGraph
    program: ExportedProgram
    nodes: dict[str, torch.fx.Node]


def export_graph(module: nn.Module, *args: torch.Tensor) -> Exported:
    """The operators of a module in training mode, for arguments of these sizes."""
    program = torch.export.export(module.train(), args)
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    sources = {
        **dict.fromkeys(signature.inputs_to_parameters, ValueSource.PARAMETER),
        **dict.fromkeys(signature.inputs_to_buffers, ValueSource.BUFFER),
        **dict.fromkeys(signature.inputs_to_lifted_tensor_constants, ValueSource.BUFFER),
    }
    values: dict[str, SpmdValue] = {}
    parts: dict[str, list[str]] = {}
    operators: list[SpmdOperator] = []
    nodes: dict[str, torch.fx.Node] = {}

    def add(name: str, tensor: torch.Tensor, source: ValueSource, gradient: bool) -> str:
        spec = TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        gradient = gradient and spec.is_differentiable
        values[name] = SpmdValue(name, spec, source, gradient)
        return name

    given: dict[str, str] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            source = sources.get(node.name, ValueSource.INPUT)
            name = names.get(node.name, node.name)
            given[node.name] = add(name, node.meta["val"], source, source is ValueSource.PARAMETER)
        elif node.op == "call_function" and node.target is __import__("operator").getitem:
            given[node.name] = parts[node.args[0].name][node.args[1]]
        elif node.op == "call_function" and node.meta["val"] is not None:
            operator = _operator(node, given, values, add, parts)
            operators.append(operator)
            nodes[node.name] = node
            if len(operator.outputs) == 1 and isinstance(node.meta["val"], torch.Tensor):
                given[node.name] = operator.outputs[0]
        elif node.op == "output":
            outputs = [given[n.name] for n in node.args[0]]
    used = {name for operator in operators for name in (*operator.inputs, *operator.outputs)}
    kept = tuple(value for name, value in values.items() if name in used or name in outputs)
    return Exported(SpmdGraph(kept, tuple(operators), tuple(outputs)), program, nodes)


def _operator(node: Any, given: Any, values: Any, add: Any, parts: Any) -> SpmdOperator:
    inputs, arguments, attributes = [], [], {}
    schema = [argument.name for argument in node.target._schema.arguments]
    for name, value in [*zip(schema, node.args), *node.kwargs.items()]:
        if isinstance(value, torch.fx.Node):
            inputs.append(given[value.name])
            arguments.append(name)
        elif isinstance(value, (list, tuple)) and any(isinstance(v, torch.fx.Node) for v in value):
            for index, item in enumerate(value):
                if item is not None:
                    inputs.append(given[item.name])
                    arguments.append(f"{name}[{index}]")
        else:
            attributes[name] = _plain(value)
    result = node.meta["val"]
    constant = ("zeros_like", "ones_like", "detach", "one_hot", "argmax")
    gradient = any(values[name].requires_grad for name in inputs)
    gradient = gradient and str(node.target).split(".")[1] not in constant
    tensors = [result] if isinstance(result, torch.Tensor) else list(result)
    single = isinstance(result, torch.Tensor)
    outputs = [
        add(node.name if single else f"{node.name}.{i}", tensor, ValueSource.OPERATOR, gradient)
        for i, tensor in enumerate(tensors)
    ]
    parts[node.name] = outputs
    return SpmdOperator(
        node.name,
        node.target._schema.name.removeprefix("aten::"),
        tuple(inputs),
        tuple(arguments),
        tuple(outputs),
        attributes,
        flops=_flops(node),
    )


def _plain(value: Any) -> object:
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    return str(value)


def _flops(node: Any) -> float:
    def meta(value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            return torch.empty(
                value.meta["val"].shape, dtype=value.meta["val"].dtype, device="meta"
            )
        return [meta(v) for v in value] if isinstance(value, (list, tuple)) else value

    if not any(
        word in str(node.target)
        for word in ("linear", "mm", "matmul", "conv", "einsum", "attention")
    ):
        return 0.0
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        node.target(*map(meta, node.args), **{k: meta(v) for k, v in node.kwargs.items()})
    return float(counter.get_total_flops())


def call(node: Any, inputs: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]) -> Any:
    """Runs an operator on tensors; sizes among its arguments are those of the outputs."""
    left = iter(inputs)

    def filled(name: str, value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            return next(left)
        if isinstance(value, (list, tuple)) and any(isinstance(v, torch.fx.Node) for v in value):
            return [next(left) if v is not None else None for v in value]
        if name in ("size", "shape") and "aten.view" in str(node.target):
            return list(shapes[0])
        if name in ("size", "shape") and (
            "expand" in str(node.target) or "reshape" in str(node.target)
        ):
            return list(shapes[0])
        if name == "sizes" and "unflatten" in str(node.target):
            dim = node.args[1] % node.args[0].meta["val"].dim()
            return list(shapes[0][dim : dim + len(value)])
        return value

    schema = [argument.name for argument in node.target._schema.arguments]
    args = [filled(name, value) for name, value in zip(schema, node.args)]
    kwargs = {name: filled(name, value) for name, value in node.kwargs.items()}
    result = node.target(*args, **kwargs)
    return [result] if isinstance(result, torch.Tensor) else list(result)
