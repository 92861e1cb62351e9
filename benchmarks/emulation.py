"""Prediction against emulation: step times of one table from one run.

Every configuration is simulated (``lightning_gpp.simulate.simulate``) and run on emulated devices
(``lightning_gpp.emulation``: the real executor, messages and sums in threads, with tensors
that are shapes alone), from the same program and the same costs. The two share the durations and
nothing else: when things happen is the event engine's business in the one, the runtime's and the
clock's in the other.

    python benchmarks/emulation.py                      # all configurations, some minutes
    python benchmarks/emulation.py --only replica       # those with this in their name

``error`` is the emulated step over the predicted one, less one; ``slip`` is what did not fit its
emulated time on the rank that slipped most, as part of the step. Slip is this machine's doing (a
process beside it, say), so a run that slips by more than 1 % is repeated, and of three the one that
slipped least counts.
"""

from __future__ import annotations

import platform
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from helpers.threads.shapes import emulate_shapes
from measuring import least_slipped, parser, quiet, slip

from lightning_gpp.cluster import Cluster, Device, Link
from lightning_gpp.common.text_table import text_table
from lightning_gpp.graph import FEED, GraphInput, ModelGraph, OpNode, Parameter, TensorSpec, Value
from lightning_gpp.planner import Plan, Stage, plan_graph
from lightning_gpp.schedule import Program
from lightning_gpp.simulate.program_costs import (
    Bucket,
    MessageBytes,
    ProgramCosts,
    StageCosts,
)
from lightning_gpp.simulate.simulation import simulate

FORWARD_S, BACKWARD_S = 0.010, 0.020
BANDWIDTH = 1e9
BUCKETS = 4
BUCKET_BYTES = 6_000_000

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One configuration. Times are those of a 10 ms forward and a 20 ms backward per unit.

    Attributes:
        name: of the row.
        branches: parallel chains between the input and the join.
        depth: stages of each chain.
        skips: whether the first stage of every chain also feeds the join, and the next chain's end.
        microbatches: units of the mini-batch.
        schedule: name of the schedule.
        replicas: devices of every stage but the join.
        multiple: units that the stages with replicas take at a time, per replica.
        unequal: how far the devices' speeds are apart (0.5: up to 1.5 times).
        message: seconds of a message of one unit on an idle link, in forwards.
        latency_s: of every link.
        is_shared: whether the devices of a host share a bus, and the hosts a port to the network.
        is_full_duplex: whether links go both ways at a time.
        per_host: devices of a host.
        stages_per_device: stages that share a device.
    """

    name: str
    branches: int = 1
    depth: int = 3
    skips: bool = False
    microbatches: int = 8
    schedule: str = "1f1b"
    replicas: int = 1
    multiple: int = 1
    unequal: float = 0.0
    message: float = 0.1
    latency_s: float = 1e-4
    is_shared: bool = False
    is_full_duplex: bool = True
    per_host: int = 64
    stages_per_device: int = 1


CASES = (
    Case("chain", depth=3),
    Case("chain, gpipe", depth=3, schedule="gpipe"),
    Case("chain, 4 micro-batches", depth=7, microbatches=4, message=0.5),
    Case("chain, 32 micro-batches", depth=7, microbatches=32, message=0.5),
    Case("chain, slow links", depth=5, microbatches=16, message=1.5),
    Case("chain, slow links, gpipe", depth=5, schedule="gpipe", message=2.5),
    Case("chain, unequal devices", depth=5, microbatches=16, unequal=0.8, message=0.3),
    Case("chain, latency", depth=4, microbatches=16, message=0.01, latency_s=4e-3),
    Case("two branches", branches=2, depth=2),
    Case("two branches, gpipe", branches=2, depth=2, schedule="gpipe"),
    Case("two branches, skips", branches=2, depth=3, skips=True, microbatches=16, message=0.4),
    Case("two branches, slow links", branches=2, depth=3, microbatches=16, message=1.2),
    Case("three branches, unequal", branches=3, depth=2, microbatches=12, unequal=0.7),
    Case("four branches", branches=4, depth=2, microbatches=16, message=0.3),
    Case("four branches, unequal, skips", branches=4, depth=2, skips=True, unequal=0.5),
    Case("eight branches", branches=8, depth=1, microbatches=16, message=0.2),
    Case("eight branches, deep", branches=8, depth=3, microbatches=16, message=0.3, unequal=0.2),
    Case("eight branches, gpipe", branches=8, depth=2, schedule="gpipe", message=0.5),
    Case("shared bus", branches=4, depth=2, is_shared=True, message=0.15),
    Case("shared bus, slow", branches=4, depth=2, is_shared=True, message=0.6, unequal=0.3),
    Case("shared network of hosts", branches=4, depth=2, is_shared=True, per_host=2, message=0.4),
    Case("half duplex", depth=5, is_full_duplex=False, microbatches=16, message=0.6),
    Case("half duplex, branches", branches=4, depth=2, is_full_duplex=False, message=0.5),
    Case(
        *("half duplex, shared, hosts", 2, 3),
        is_full_duplex=False,
        is_shared=True,
        per_host=3,
        microbatches=16,
        message=0.5,
        unequal=0.3,
    ),
    Case("replicas", depth=3, replicas=2, message=0.2),
    Case("replicas of branches", branches=2, depth=2, replicas=2, microbatches=16, unequal=0.3),
    Case("replicas, gpipe", depth=2, replicas=4, schedule="gpipe", microbatches=16),
    Case("replicas on a shared bus", depth=3, replicas=2, is_shared=True, message=0.3),
    Case("replicas, larger micro-batches", depth=3, replicas=2, multiple=2, microbatches=16),
    Case("replicas, half duplex", depth=2, replicas=4, is_full_duplex=False, microbatches=16),
    Case("two stages per device", branches=2, depth=3, stages_per_device=2, microbatches=16),
    Case("32 devices", branches=1, depth=31, microbatches=32, message=0.2, unequal=0.1),
    Case("32 devices, branches", branches=6, depth=5, microbatches=16, message=0.5, unequal=0.3),
)


def main() -> None:
    """Runs the cases and prints the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--only", default="", help="cases with this in their name")
    given = arguments.parse_args()
    quiet()
    print(f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}\n")
    print(render([measured(case) for case in CASES if given.only in case.name]))


def measured(case: Case) -> Row:
    """Predicts and emulates a case."""
    graph, program, costs = problem(case)
    predicted = simulate(program, costs)
    start_s = time.monotonic()
    size = case.microbatches
    run = least_slipped(
        lambda: emulate_shapes(program, graph, costs, minibatch_size=size, timeout_s=300.0)
    )
    return {
        "case": case.name,
        "devices": len(program.actions),
        "stages": program.num_stages,
        "m": case.microbatches,
        "schedule": case.schedule,
        "actions": sum(map(len, program.actions)),
        "predicted": predicted.step_s,
        "emulated": run.step_s,
        "error": run.step_s / predicted.step_s - 1,
        "slip": slip(run),
        "real": time.monotonic() - start_s,
    }


def problem(case: Case) -> tuple[ModelGraph, Program, ProgramCosts]:
    """The model, the program and the costs of a case."""
    graph = model(case)
    plan = plan_of(case, graph)
    program = plan_graph(plan, graph).program(case.microbatches, schedule=case.schedule)
    return graph, program, costs_of(case, program)


def model(case: Case) -> ModelGraph:
    """One operator per stage: the chains, then the join."""
    result = (TensorSpec((1, 16), "float32", 0),)
    operators, parameters = [], []
    for branch in range(case.branches):
        reads = "x"
        for depth in range(case.depth):
            name = f"b{branch}_{depth}"
            own = [Parameter(f"{name}.w{number}", BUCKET_BYTES) for number in range(BUCKETS)]
            weights = tuple(parameter.name for parameter in own)
            value = Value(f"{name}_out", result)
            operators.append(OpNode(name, "torch.add", "", (reads,), (value,), weights))
            parameters += own
            reads = value.name
    ends = [f"b{branch}_{case.depth - 1}_out" for branch in range(case.branches)]
    if case.skips:
        ends += [f"b{branch}_0_out" for branch in range(case.branches)]
    operators.append(
        OpNode("join", "torch.cat", "", tuple(dict.fromkeys(ends)), (Value("y", result),))
    )
    inputs = (GraphInput(Value("x", result)),)
    return ModelGraph(inputs, tuple(operators), ("y",), tuple(parameters))


def plan_of(case: Case, graph: ModelGraph) -> Plan:
    """Every operator is a stage; each has its devices, or shares one with the stages before it."""
    stages, device = [], 0
    for number, operator in enumerate(graph):
        count = case.replicas if operator.name != "join" else 1
        home = tuple(range(device, device + count))
        multiple = case.replicas * case.multiple
        stages.append(Stage(number, (operator.name,), home, multiple))
        if (number + 1) % case.stages_per_device == 0:
            device += count
    return Plan(tuple(stages), num_microbatches=case.microbatches)


def costs_of(case: Case, program: Program) -> ProgramCosts:
    """Costs of a program; every message of a unit has the same bytes."""
    choose = random.Random(case.name)
    speeds = [1.0 + case.unequal * choose.random() for _ in program.actions]
    stages = tuple(
        StageCosts(
            FORWARD_S * program.multiple(stage) * speeds[device],
            BACKWARD_S * program.multiple(stage) * speeds[device],
        )
        for stage, device in enumerate(program.devices)
    )
    size = MessageBytes(case.message * FORWARD_S * BANDWIDTH)
    sizes: Mapping[tuple[int, int], MessageBytes] = {
        (edge.source, edge.target): MessageBytes(0.0) if edge.source == FEED else size
        for edge in program.edges
    }
    return ProgramCosts(
        cluster_of(case, len(program.actions)),
        stages,
        sizes,
        sizes,
        tuple(buckets(program)),
    )


def buckets(program: Program) -> Iterator[Bucket]:
    """Equal buckets, of which the gradients come one after the other."""
    for index, group in enumerate(program.reduce_groups):
        for number in range(len(group.parameters)):
            fraction = (number + 1) / len(group.parameters)
            yield Bucket(index, BUCKET_BYTES, ready_fraction=fraction)


def cluster_of(case: Case, num_devices: int) -> Cluster:
    """Devices in hosts; links between hosts are half as fast as in them."""
    devices = tuple(
        Device(f"gpu{number}", host=f"host{number // case.per_host}")
        for number in range(num_devices)
    )
    inside, between = (
        Link(bandwidth, case.latency_s, case.is_shared, case.is_full_duplex)
        for bandwidth in (BANDWIDTH, BANDWIDTH / 2)
    )
    return Cluster(devices, inside, between)


FORMATS = {"predicted": ".4f", "emulated": ".4f", "error": "+.2%", "slip": ".2%"}
FORMATS |= {"real": ".1f"}


def render(rows: Sequence[Row]) -> str:
    """The table, and the errors in one line; seconds of the emulated devices, but for real ones."""
    table = [[format(value, FORMATS.get(key, "")) for key, value in row.items()] for row in rows]
    left = {"case", "schedule"}
    errors = {abs(row["error"]): row["case"] for row in rows}
    return (
        f"{text_table([*rows[0]], table, left=left, max_width=200)}\n\n{len(rows)} configurations: "
        f"mean error {statistics.mean(abs(row['error']) for row in rows):.2%}, worst "
        f"{max(errors):.2%} ({errors[max(errors)]}), in {sum(row['real'] for row in rows):.0f} s"
    )


if __name__ == "__main__":
    main()
