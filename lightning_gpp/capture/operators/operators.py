"""From traced nodes to the operators and values of a :class:`ModelGraph`."""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping, Sequence

from torch import fx, nn

from lightning_gpp.capture.operators.granularity import Group, coarsen
from lightning_gpp.capture.operators.grouping import group_nodes
from lightning_gpp.capture.operators.normalize import function_name, module_identifier, observation
from lightning_gpp.capture.operators.observe import assigned_buffers
from lightning_gpp.capture.operators.variation import Cuts
from lightning_gpp.capture.tracing.trace import Names, Trace
from lightning_gpp.capture.values.structure import LOOK_UPS
from lightning_gpp.graph import (
    GraphInput,
    ModelGraph,
    OpNode,
    Parameter,
    TensorSpec,
    Value,
)


def model_graph(
    module: nn.Module, traces: Mapping[bool, Trace], cuts: Cuts
) -> tuple[ModelGraph, dict[str, tuple[str, ...]]]:
    """The graph, and for every operator the names of its nodes.

    Args:
        module: the captured module.
        traces: normalized, by training flag; both have the same nodes.
        cuts: of every value.
    """
    nodes = [node for node in traces[True].graph.nodes if node.op != "output"]
    owned = _owned(module, nodes)
    parameters = dict(module.named_parameters())
    buffers = {name: tensors - parameters.keys() for name, tensors in owned.items()}
    groups = coarsen(group_nodes(traces, buffers), module)
    names = _names(groups, nodes)
    operators = tuple(
        _operator(group, name, owned, list(parameters), cuts)
        for group, name in zip(groups, names, strict=True)
    )
    read = {name for operator in operators for name in operator.parameters}
    graph = ModelGraph(
        inputs=tuple(_graph_input(node, cuts) for node in nodes if node.op == "placeholder"),
        operators=operators,
        outputs=tuple(
            dict.fromkeys(leaf.name for leaf in traces[True].outputs if isinstance(leaf, fx.Node))
        ),
        parameters=tuple(
            Parameter(name, parameter.numel() * parameter.element_size(), parameter.requires_grad)
            for name, parameter in parameters.items()
            if name in read
        ),
    )
    members = [tuple(node.name for node in group.nodes) for group in groups]
    return graph, dict(zip(names, members, strict=True))


def _owned(module: nn.Module, nodes: Sequence[fx.Node]) -> dict[str, frozenset[str]]:
    """Node name -> canonical names of the parameters and buffers that it reads."""
    names = Names.of(module)
    canonical = names.canonical(module)
    return {
        node.name: read_names(node, canonical) | assigned_buffers(node, names) for node in nodes
    }


def read_names(node: fx.Node, canonical: Mapping[str, str]) -> frozenset[str]:
    """Canonical names of the parameters and buffers that a node reads.

    Args:
        node: in question.
        canonical: by every name.
    """
    found = {str(arg.target) for arg in node.all_input_nodes if arg.op == "get_attr"}
    if node.op == "call_module":
        prefix = f"{node.target}."
        found |= {name for full, name in canonical.items() if full.startswith(prefix)}
    return frozenset(found)


def _operator(
    group: Group,
    name: str,
    owned: Mapping[str, frozenset[str]],
    parameters: Sequence[str],
    cuts: Cuts,
) -> OpNode:
    nodes, members = group.nodes, set(group.nodes)
    principal = _principal(nodes)
    inputs = (
        arg.name
        for node in nodes
        for arg in node.all_input_nodes
        if arg not in members and arg.op != "get_attr"
    )
    read = frozenset().union(*(owned[node.name] for node in nodes))
    return OpNode(
        name=name,
        target=function_name(principal) if group.call is None else group.call.name,
        scope=principal.meta["scope"] if group.call is None else group.call.name,
        inputs=tuple(dict.fromkeys(inputs)),
        outputs=tuple(_value(node, cuts) for node in nodes if set(node.users) - members),
        parameters=tuple(name for name in parameters if name in read),
        state=tuple(
            sorted(frozenset().union(*(observation(node).changed_buffers for node in nodes)))
        ),
    )


def _names(groups: Sequence[Group], nodes: Sequence[fx.Node]) -> list[str]:
    """A name per operator: of the call of a module that it is, else of its principal node."""
    taken = {node.name for node in nodes}
    names = []
    for group in groups:
        name = _principal(group.nodes).name
        if group.call is not None:
            name = _unused(module_identifier(group.call.name), taken)
            taken.add(name)
        names.append(name)
    return names


def _unused(name: str, taken: Container[str]) -> str:
    """``name``, with a number if it is taken."""
    numbered = (f"{name}_{number}" for number in itertools.count(1))
    return next(item for item in itertools.chain([name], numbered) if item not in taken)


def _principal(group: Sequence[fx.Node]) -> fx.Node:
    """The node that gives a group its name: a module, else the first real computation."""
    for node in group:
        if node.op == "call_module":
            return node
    for node in group:
        if observation(node).has_tensors and node.target not in LOOK_UPS and node.all_input_nodes:
            return node
    return group[0]


def _graph_input(node: fx.Node, cuts: Cuts) -> GraphInput:
    requires_grad = observation(node).requires_grad
    return GraphInput(_value(node, cuts), requires_grad, cuts.stays(node.name, requires_grad))


def _value(node: fx.Node, cuts: Cuts) -> Value:
    seen = observation(node)
    dims = cuts.batch_dims[node.name], cuts.vertex_dims[node.name]
    return Value(
        node.name,
        tuple(
            TensorSpec(shape, str(dtype).removeprefix("torch."), *dim)
            for shape, dtype, *dim in zip(seen.shapes, seen.dtypes, *dims, strict=True)
        ),
        cuts.variations[node.name],
    )
