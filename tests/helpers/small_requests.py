"""Questions on small series-parallel models, with whole numbers as costs."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise

from helpers.series_parallel import Tree, edges_of, leaves
from lightning_gpp.cluster import Cluster, Device, Link, uniform_cluster
from lightning_gpp.cost import Costs, OpProfile, Profile
from lightning_gpp.graph import GraphInput, ModelGraph, OpNode, Parameter, TensorSpec, Value
from lightning_gpp.planner import PlanRequest
from lightning_gpp.planner.make_plan import plan_request

MINIBATCH = 16
"""Samples of a step."""

SIZES = (1, 2, 4)
"""Micro-batch sizes that were "measured"; others are on the line through them."""

FREE = Link(bandwidth_bytes_per_s=1e30)

VALUE_BYTES = 4
"""Of one feature of one sample."""


@dataclass(frozen=True)
class Setting:
    """What is drawn.

    Attributes:
        kinds: kind of every device, one letter each.
        has_messages: whether messages take time.
        has_memory: whether devices have limits, in which not every division fits.
        may_recompute: as in a request.
        num_hosts: hosts that devices are dealt to; links between them are slower.
        schedule: as in a request; with ``gpipe`` limits are as much larger as stages hold more.
    """

    kinds: str
    has_messages: bool = False
    has_memory: bool = False
    may_recompute: bool = False
    num_hosts: int = 1
    schedule: str = "1f1b"


SETTINGS = {
    "equal": Setting("aaaa"),
    "three": Setting("aaa"),
    "messages": Setting("aaaa", has_messages=True),
    "hosts": Setting("aaaa", has_messages=True, num_hosts=2),
    "memory": Setting("aaa", has_memory=True),
    "recompute": Setting("aaaa", has_messages=True, has_memory=True, may_recompute=True),
    "two kinds": Setting("ab"),
    "three of two kinds": Setting("abb", has_messages=True),
    "four of two kinds": Setting("aabb", has_memory=True),
    "everything": Setting("abbb", has_messages=True, has_memory=True, may_recompute=True),
}
"""What is tried, by name; a letter is a kind of device."""

HOLDING_ALL = {
    f"{name}, gpipe": replace(SETTINGS[name], schedule="gpipe")
    for name in ("memory", "recompute", "four of two kinds", "everything")
}
"""Those with memory limits, where stages hold all micro-batches."""


def random_request(tree: Tree, setting: Setting, rng: random.Random) -> PlanRequest:
    """A model with this tree on devices of a setting.

    An operator takes ``fixed + per_sample * size`` seconds, so that replicas are not for nothing,
    and some operators cannot have any.
    """
    graph = _graph(tree, rng, with_parameters=setting.has_messages or setting.has_memory)
    costs = _costs(graph, setting, rng)
    return plan_request(
        graph,
        _cluster(graph, costs, setting, rng),
        minibatch_size=MINIBATCH,
        costs=costs,
        schedule=setting.schedule,
        may_recompute=setting.may_recompute,
    )


def _graph(tree: Tree, rng: random.Random, *, with_parameters: bool) -> ModelGraph:
    edges, count = edges_of(tree), len(list(leaves(tree)))
    operators = []
    for node in range(count):
        reads = tuple(f"v{a}" for a, b in edges if b == node) or ("x",)
        state = (f"s{node}",) if rng.random() < 0.25 else ()
        parameters = (f"w{node}",) if with_parameters and rng.random() < 0.5 else ()
        spec = TensorSpec((1, rng.randint(1, 3)), "float32", 0)
        outputs = (Value(f"v{node}", (spec,)),)
        operators.append(OpNode(f"o{node}", "torch.add", "", reads, outputs, parameters, state))
    sinks = [node for node in range(count) if all(a != node for a, _ in edges)]
    return ModelGraph(
        (GraphInput(Value("x", (TensorSpec((1, 1), "float32", 0),))),),
        tuple(operators),
        tuple(f"v{node}" for node in sinks),
        tuple(
            Parameter(name, 4 * rng.randint(1, 5))
            for operator in operators
            for name in operator.parameters
        ),
    )


def _costs(graph: ModelGraph, setting: Setting, rng: random.Random) -> Costs:
    lines: dict[str, tuple[float, float]]
    lines = {o.name: (rng.randint(0, 3), rng.randint(1, 6)) for o in graph}
    kept = {o.name: 4 * rng.randint(0, 3) for o in graph}
    profiles = []
    for number, kind in enumerate(dict.fromkeys(setting.kinds)):
        if number:  # a multiple that differs between operators, as on real devices
            factors = {name: rng.choice((1.5, 2, 2.5, 3)) for name in lines}
            lines = {n: (f * factors[n], e * factors[n]) for n, (f, e) in lines.items()}
        profiles += [
            Profile(
                {
                    name: OpProfile((fixed + each * size) / 3, (fixed + each * size) * 2 / 3,
                                    kept[name] * size)
                    for name, (fixed, each) in lines.items()
                },
                size,
                kind,
            )
            for size in SIZES
        ]  # fmt: skip
    return Costs(tuple(profiles))


def _cluster(graph: ModelGraph, costs: Costs, setting: Setting, rng: random.Random) -> Cluster:
    memory: dict[str, int | None] = dict.fromkeys(setting.kinds)
    if setting.has_memory:
        whole = 4 * sum(parameter.size_bytes for parameter in graph.parameters)
        activations = costs.profiles[0].operators.values()
        held = MINIBATCH if setting.schedule == "gpipe" else 2 * 4
        whole += held * sum(operator.activation_bytes for operator in activations)
        memory = {kind: max(1, round(whole * rng.uniform(0.1, 1.0))) for kind in memory}
    hosts = [f"host{index % setting.num_hosts}" for index in range(len(setting.kinds))]
    devices = tuple(
        Device(f"d{index}", kind, memory[kind], host)
        for index, (kind, host) in enumerate(zip(setting.kinds, sorted(hosts)))
    )
    if not setting.has_messages:
        return Cluster(devices, FREE)
    seconds = rng.choice((0.25, 0.5, 1, 2))  # of one feature of one sample
    inside = Link(VALUE_BYTES / seconds, rng.choice((0.0, 0.5, 2.0)))
    between = Link(VALUE_BYTES / (3 * seconds), inside.latency_s + 1.0)
    return Cluster(devices, inside, between if setting.num_hosts > 1 else None)


def chain_request(
    num_layers: int, num_devices: int, num_microbatches: int, message_s: float = 1e-5
) -> PlanRequest:
    """Equal layers, each 1 ms forward and 2 ms backward for a micro-batch of one sample."""
    spec = (TensorSpec((1, 1), "float32", batch_dim=0),)
    values = [Value(f"v{number}", spec) for number in range(num_layers + 1)]
    nodes = [
        OpNode(f"layer{number}", "tanh", "", (own.name,), (made,))
        for number, (own, made) in enumerate(pairwise(values))
    ]
    graph = ModelGraph((GraphInput(values[0]),), tuple(nodes), (values[-1].name,))
    costs = Profile({node.name: OpProfile(1e-3, 2e-3, 0) for node in nodes}, 1, "any")
    return plan_request(
        graph,
        uniform_cluster(num_devices, Link(1e12, message_s), kind="any"),
        minibatch_size=num_microbatches,
        num_microbatches=num_microbatches,
        costs=costs,
        schedule="gpipe",
        max_replicas=1,
    )
