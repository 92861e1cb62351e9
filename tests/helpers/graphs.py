"""Small literal model graphs, and random ones; no torch needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import assume
from hypothesis import strategies as st

from lightning_gpp.cost import OpProfile, Profile
from lightning_gpp.graph import (
    GraphInput,
    ModelGraph,
    OpNode,
    Parameter,
    StageEdge,
    StageGraph,
    TensorSpec,
    Value,
)

MICROBATCH_SIZE = 4
PARAMETER_BYTES = 1000


def value(name: str, features: int = 16, batch_dim: int | None = 0) -> Value:
    """One float32 tensor of ``MICROBATCH_SIZE`` rows."""
    return Value(name, (TensorSpec((MICROBATCH_SIZE, features), "float32", batch_dim),))


def literal_graph(
    operators: Mapping[str, str],
    *,
    outputs: Sequence[str] | None = None,
    inputs: Sequence[str] = ("x",),
    state: Mapping[str, Sequence[str]] | None = None,
    parameters: Mapping[str, Sequence[str]] | None = None,
    unbatched: Sequence[str] = (),
) -> ModelGraph:
    """A graph from a table of operators and what they read.

    A name with a dot, or without one, is a module; ``cat()`` is the function ``torch.cat`` in the
    root. Every operator makes one value of its own name; modules have one parameter each.

    Args:
        operators: qualified name -> names that it reads, separated by blanks.
        outputs: what the model returns; the last operator's value by default.
        inputs: arguments of the model.
        state: operator -> states that it changes.
        parameters: operator -> parameters that it reads, instead of its own.
        unbatched: values without a dimension of samples.
    """
    nodes = []
    for name, reads in operators.items():
        function = name.endswith("()")
        target = f"torch.{name[:-2]}" if function else name
        own = () if function else (f"{name}.weight",)
        nodes.append(
            OpNode(
                name=name.removesuffix("()").replace(".", "_"),
                target=target,
                scope="" if function else name,
                inputs=tuple(read.removesuffix("()") for read in reads.split()),
                outputs=(
                    value(name.removesuffix("()"), batch_dim=None if name in unbatched else 0),
                ),
                parameters=tuple((parameters or {}).get(name, own)),
                state=tuple((state or {}).get(name, ())),
            )
        )
    names = dict.fromkeys(parameter for node in nodes for parameter in node.parameters)
    return ModelGraph(
        inputs=tuple(GraphInput(value(name)) for name in inputs),
        operators=tuple(nodes),
        outputs=tuple(outputs or [nodes[-1].outputs[0].name]),
        parameters=tuple(Parameter(name, PARAMETER_BYTES) for name in names),
    )


def profile_of(graph: ModelGraph, forward_s: Mapping[str, float] | float = 1e-3) -> Profile:
    """A profile with backwards of twice the forward."""
    return Profile(
        {
            operator.name: OpProfile(cost, 2 * cost, activation_bytes=100)
            for operator in graph
            for cost in [
                forward_s if isinstance(forward_s, (int, float)) else forward_s[operator.name]
            ]
        },
        microbatch_size=MICROBATCH_SIZE,
    )


def stage_edges(num_stages: int, edges: str) -> StageGraph:
    """A stage graph from a text like ``"0>1 0>2"``; every message has 1000 bytes."""
    pairs = sorted(tuple(map(int, edge.split(">"))) for edge in edges.split())
    return StageGraph(
        num_stages, tuple(StageEdge(a, b, (f"v{a}",), size_bytes=1000) for a, b in pairs)
    )


@st.composite
def model_graphs(
    draw: st.DrawFn, min_operators: int = 1, max_operators: int = 9, with_state: bool = True
) -> ModelGraph:
    """Random models: forks, joins, skips, several inputs and outputs, shared parameters, state.

    Everything that is made is read or returned. Some operators are functions, some modules.
    """
    count = draw(st.integers(min_operators, max_operators))
    arguments = ["x", "y"][: draw(st.integers(1, 2))]
    names = list(arguments)
    nodes: list[OpNode] = []
    for index in range(count):
        recent = st.sampled_from(names[-4:])  # chains and branches more often than far skips
        reads = draw(st.lists(st.one_of(recent, st.sampled_from(names)), min_size=1, max_size=3))
        is_module = draw(st.booleans())
        scope = f"part{draw(st.integers(0, 2))}.{index}" if is_module else ""
        parameters = [f"w{index}"] if is_module else []
        if nodes and draw(st.integers(0, 5)) == 0:
            parameters += nodes[draw(st.integers(0, len(nodes) - 1))].parameters
        has_state = with_state and draw(st.integers(0, 5)) == 0
        nodes.append(
            OpNode(
                name=f"op{index}",
                target=scope or "torch.add",
                scope=scope,
                inputs=tuple(dict.fromkeys(reads)),
                outputs=(value(f"v{index}", features=draw(st.sampled_from([1, 16, 4096]))),),
                parameters=tuple(dict.fromkeys(parameters)),
                state=(f"state{draw(st.integers(0, 1))}",) if has_state else (),
            )
        )
        names.append(f"v{index}")
    read = {name for node in nodes for name in node.inputs}
    outputs = [f"v{i}" for i in range(count) if f"v{i}" not in read or draw(st.integers(0, 8)) == 0]
    known = dict.fromkeys(name for node in nodes for name in node.parameters)
    return ModelGraph(
        inputs=tuple(GraphInput(value(name), draw(st.booleans())) for name in arguments),
        operators=tuple(nodes),
        outputs=tuple(outputs),
        parameters=tuple(Parameter(name, draw(st.integers(4, 10**6))) for name in known),
    )


@st.composite
def profiles(draw: st.DrawFn, graph: ModelGraph) -> Profile:
    """Random costs for a graph, some of them zero, but not all."""
    costs = st.sampled_from([0.0, 1e-5, 1e-4, 3e-4, 1e-3, 5e-3])
    operators = {
        operator.name: OpProfile(draw(costs), draw(costs), draw(st.integers(0, 10**6)))
        for operator in graph
    }
    assume(any(each.forward_s or each.backward_s for each in operators.values()))
    return Profile(operators, microbatch_size=MICROBATCH_SIZE)
