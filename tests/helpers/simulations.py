"""Random programs with random costs, to be simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from helpers.graphs import stage_edges
from helpers.stage_dags import stage_graphs
from lightning_gpp.cluster import Cluster, Device, Link
from lightning_gpp.graph import FEED, StageEdge, StageGraph
from lightning_gpp.schedule import SCHEDULES, Action, Program, build_program
from lightning_gpp.simulate import (
    Bucket,
    MessageBytes,
    ProgramCosts,
    Simulation,
    SpanKind,
    StageCosts,
    StepCosts,
    TransferKind,
    simulate,
)
from lightning_gpp.simulate.program_costs import message_costs

SECONDS = st.integers(0, 40).map(lambda quarters: quarters / 4)
"""Multiples of a quarter: sums of them are exact."""

EVERY_SCHEDULE = st.sampled_from(sorted(SCHEDULES))

FAST = Link(1e30)
"""Messages take no time."""


@dataclass(frozen=True)
class Case:
    """A program and what it costs."""

    program: Program
    costs: ProgramCosts


@st.composite
def random_simulations(
    draw: st.DrawFn,
    *,
    with_replicas: bool = True,
    private_channels: bool = True,
    step: st.SearchStrategy[StepCosts] | None = None,
    **options: Any,
) -> Case:
    """A random stage graph on random devices with random durations.

    Args:
        draw: of hypothesis.
        with_replicas: draw replicas and the sums of their gradients too.
        private_channels: whether all links are private and full duplex.
        step: what comes besides.
        options: of :func:`programs`.
    """
    program = draw(programs(with_replicas=with_replicas, **options))
    num_devices = len(program.actions)
    cluster = draw(clusters(num_devices, private_channels=private_channels))
    stages = tuple(
        StageCosts(draw(SECONDS), draw(SECONDS), *(draw(st.integers(0, 9)) for _ in range(3)))
        for _ in range(program.num_stages)
    )
    sizes = st.builds(MessageBytes, per_unit=SECONDS, fixed=SECONDS)
    pairs = [(edge.source, edge.target) for edge in program.edges]
    buckets = [
        Bucket(group, draw(SECONDS), draw(st.sampled_from([0.25, 0.5, 1.0])))
        for group in range(len(program.reduce_groups))
        for _ in range(draw(st.integers(1, 3)))
    ]
    return Case(
        program,
        ProgramCosts(
            cluster,
            stages,
            {pair: draw(sizes) for pair in pairs},
            {pair: draw(sizes) for pair in pairs},
            tuple(replace(b, ready_fraction=min(1.0, b.ready_fraction)) for b in buckets),
            draw(step) if step is not None else StepCosts(),
        ),
    )


@st.composite
def programs(
    draw: st.DrawFn,
    *,
    with_replicas: bool = True,
    with_dead_ends: bool = False,
    schedules: st.SearchStrategy[str] = EVERY_SCHEDULE,
) -> Program:
    """Programs of random stage graphs; several stages may share a device.

    Args:
        draw: of hypothesis.
        with_replicas: whether stages may have replicas, and share parameters.
        with_dead_ends: whether edges may miss, or bring no gradient back.
        schedules: where their schedules come from.
    """
    stages = draw(stage_graphs(max_stages=5))
    if with_dead_ends:
        stages = draw(_dead_ends(stages))
    last = stages.num_stages
    loss = StageEdge(last - 1, last, (f"v{last - 1}",))  # so that all others may have replicas
    readers = tuple((f"w{stage}", (stage,)) for stage in range(last))
    shared = draw(st.sets(st.integers(0, last - 1), max_size=2))
    if len(shared) > 1 and with_replicas:
        readers = (*readers, ("tied", tuple(sorted(shared))))
    stages = StageGraph(last + 1, (*stages.edges, loss), readers)
    num_devices = draw(st.integers(1, last + 1))
    homes, multiples = [], []
    for _ in range(last):
        multiples.append(draw(st.sampled_from([1, 2, 4])))
        counts = [n for n in (1, 2) if n <= num_devices and multiples[-1] % n == 0]
        count = draw(st.sampled_from(counts)) if with_replicas else 1
        start = draw(st.integers(0, num_devices - 1))
        homes.append([(start + i) % num_devices for i in range(count)])
    homes.append([draw(st.integers(0, num_devices - 1))])
    multiples.append(draw(st.sampled_from([1, 2, 4])))
    return build_program(
        stages,
        devices=homes,
        num_microbatches=draw(st.sampled_from([4, 8])),
        shares=[(m // len(h),) * len(h) for m, h in zip(multiples, homes, strict=True)],
        schedule=draw(schedules),
    )


@st.composite
def _dead_ends(draw: st.DrawFn, stages: StageGraph) -> StageGraph:
    """The stage graph with edges that miss, and edges without gradients."""
    edges = []
    for edge in stages.edges:
        fate = draw(st.sampled_from(["as it is", "no gradient", "missing"]))
        if fate != "missing":
            edges.append(replace(edge, has_backward=fate == "as it is"))
    return replace(stages, edges=tuple(edges))


@st.composite
def clusters(draw: st.DrawFn, num_devices: int, *, private_channels: bool = True) -> Cluster:
    """Devices in hosts, with links of random speed."""
    kinds = [(False, True)] if private_channels else [(a, b) for a in (0, 1) for b in (0, 1)]
    links = []
    for _ in range(2):
        shared, duplex = draw(st.sampled_from(kinds))
        bandwidth = draw(st.sampled_from([0.5, 1.0, 2.0, 8.0]))
        links.append(Link(bandwidth, draw(SECONDS), bool(shared), bool(duplex)))
    per_host = draw(st.integers(1, 3))
    devices = tuple(Device(f"gpu{i}", host=f"host{i // per_host}") for i in range(num_devices))
    return Cluster(devices, links[0], rack_link=links[1])


def send_seconds(case: Case, action: Action) -> float:
    """Seconds that a message takes on its way."""
    source, target, is_gradient, _ = action.message
    costs = message_costs(case.program, case.costs, source, target, is_gradient=is_gradient)
    return costs.transfer_s(case.program.num_units(action))


def simulated_stages(
    edges: str,
    num_stages: int,
    *,
    num_microbatches: int = 2,
    devices: Sequence[Any] | None = None,
    forward_s: float | Sequence[float] = 1.0,
    backward_s: float | Sequence[float] = 2.0,
    memory: Sequence[float] = (),
    message_bytes: float | Mapping[tuple[int, int], float] = 0.0,
    link: Link = FAST,
    cluster: Cluster | None = None,
    buckets: Sequence[Bucket] = (),
    readers: Mapping[str, tuple[int, ...]] | None = None,
    step: StepCosts | None = None,
    **options: Any,
) -> Simulation:
    """A simulated step of a small stage graph, one stage per device by default.

    Args:
        edges: of the stage graph, as in ``"0>2 1>2"``; those of the feed (``"-1>0"``) bring no
            gradient back.
        num_stages: of the stage graph.
        num_microbatches: of the mini-batch.
        devices: of the stages.
        forward_s: seconds of a forward, of all stages of the program or of each.
        backward_s: the same of a backward.
        memory: fixed, activation and working bytes of every stage.
        message_bytes: of a message per unit, of all edges of the program or of each.
        link: between all devices.
        cluster: in place of that.
        buckets: of the gradients of replicas.
        readers: parameter -> the stages that read it; one for each stage by default.
        step: what comes besides.
        options: of ``build_program``.
    """
    names = readers or {f"w{stage}": (stage,) for stage in range(num_stages)}
    graph = stage_edges(num_stages, edges)
    stages = replace(
        graph,
        edges=tuple(replace(edge, has_backward=edge.source != FEED) for edge in graph.edges),
        parameter_readers=tuple(names.items()),
    )
    program = build_program(
        stages,
        devices=devices or range(num_stages),
        num_microbatches=num_microbatches,
        **options,
    )
    number = program.num_stages
    forwards, backwards = (
        [seconds] * number if isinstance(seconds, (int, float)) else seconds
        for seconds in (forward_s, backward_s)
    )
    sizes = {
        pair: MessageBytes(
            message_bytes[pair] if isinstance(message_bytes, Mapping) else message_bytes
        )
        for pair in program.edge
    }
    places = tuple(Device(f"gpu{index}") for index in range(len(program.actions)))
    costs = ProgramCosts(
        cluster or Cluster(places, link),
        tuple(StageCosts(f, b, *memory) for f, b in zip(forwards, backwards, strict=True)),
        sizes,
        sizes,
        tuple(buckets),
        step or StepCosts(),
    )
    return simulate(program, costs)


def task_times(
    simulation: Simulation,
    kind: SpanKind | TransferKind | None = None,
    *,
    device: int | None = None,
) -> dict[str, tuple[float, float]]:
    """Action -> start and end of its task; of one kind, or of one device without the feed."""
    return {
        str(task.action): (task.start_s, task.end_s)
        for task in simulation.tasks
        if (task.kind is kind if kind is not None else task.device == device)
        and (task.action is None or task.action.stage != FEED)
    }
