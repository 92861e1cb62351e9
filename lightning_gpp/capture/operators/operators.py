"""From traced nodes to the operators and values of a :class:`ModelGraph`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set

from torch import fx, nn

from lightning_gpp.capture.operators.grouping import coarsen, group_nodes
from lightning_gpp.capture.operators.observe import (
    assigned_buffers,
    function_name,
    module_identifier,
    observation,
)
from lightning_gpp.capture.operators.variation import Cuts
from lightning_gpp.capture.tracing.keep_whole import WholeMethod
from lightning_gpp.capture.tracing.trace import Names, Trace
from lightning_gpp.capture.values.structure import LOOK_UPS
from lightning_gpp.graph import GraphInput, ModelGraph, OpNode, Parameter, TensorSpec, Value


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
    table = Names.of(module)
    parts, parameters = table.owned(module), dict(module.named_parameters())
    places = {name: place for place, name in enumerate(parameters)}
    owned = {n.name: read_names(n, parts) | assigned_buffers(n, table) for n in nodes}
    buffers = {
        name: frozenset(each for each in tensors if each not in parameters)
        for name, tensors in owned.items()
    }
    operators, members, taken = [], dict[str, tuple[str, ...]](), {node.name for node in nodes}
    for group, call in coarsen(group_nodes(traces, buffers), module):
        principal = _principal(group)
        name = principal.name if call is None else module_identifier(call.name)
        if call is not None:
            numbered = (f"{name}_{number}" for number in itertools.count(1))
            name = next(item for item in itertools.chain([name], numbered) if item not in taken)
            taken.add(name)
        inside = set(group)
        inputs = (arg for node in group for arg in node.all_input_nodes if arg not in inside)
        read = frozenset().union(*(owned[node.name] for node in group))
        changed = frozenset().union(*(observation(node).changed_buffers for node in group))
        operator = OpNode(
            name=name,
            target=function_name(principal) if call is None else call.name,
            scope=principal.meta["scope"] if call is None else call.name,
            inputs=tuple(dict.fromkeys(arg.name for arg in inputs if arg.op != "get_attr")),
            outputs=tuple(_value(node, cuts) for node in group if set(node.users) - inside),
            parameters=tuple(sorted(read & places.keys(), key=places.__getitem__)),
            state=tuple(sorted(changed)),
        )
        operators.append(operator)
        members[name] = tuple(node.name for node in group)
    read = frozenset().union(*(operator.parameters for operator in operators))
    outputs = (leaf.name for leaf in traces[True].outputs if isinstance(leaf, fx.Node))
    graph = ModelGraph(
        inputs=tuple(
            GraphInput(_value(node, cuts), needs, cuts.stays(node.name, needs))
            for node in nodes
            if node.op == "placeholder"
            for needs in [observation(node).requires_grad]
        ),
        operators=tuple(operators),
        outputs=tuple(dict.fromkeys(outputs)),
        parameters=tuple(
            Parameter(name, parameter.numel() * parameter.element_size(), parameter.requires_grad)
            for name, parameter in parameters.items()
            if name in read
        ),
    )
    return graph, members


def read_names(node: fx.Node, owned: Mapping[str, Set[str]]) -> frozenset[str]:
    """Canonical names of the parameters and buffers that a node reads.

    Args:
        node: in question.
        owned: those in every part of the module.
    """
    found = {str(arg.target) for arg in node.all_input_nodes if arg.op == "get_attr"}
    if node.op == "call_module" or isinstance(node.target, WholeMethod):
        name = node.target if node.op == "call_module" else node.meta["layer"].name
        found |= owned.get(str(name), set())
    return frozenset(found)


def _principal(group: Sequence[fx.Node]) -> fx.Node:
    """The node that gives a group its name: a module, else the first real computation."""
    modules = (node for node in group if node.op == "call_module")
    computations = (
        node
        for node in group
        if observation(node).has_tensors and node.target not in LOOK_UPS and node.all_input_nodes
    )
    return next(itertools.chain(modules, computations, group))


def _value(node: fx.Node, cuts: Cuts) -> Value:
    seen = observation(node)
    columns = zip(seen.shapes, seen.dtypes, cuts.batch_dims[node.name], strict=True)
    return Value(
        node.name,
        tuple(
            TensorSpec(shape, str(dtype).removeprefix("torch."), dim)
            for shape, dtype, dim in columns
        ),
        cuts.variations[node.name],
    )
