"""How fast programs are made and simulated: actions per second, in CPU seconds of one process.

- ``10000``: a chain of about 10,000 actions;
- ``mmt``: the plan of ``graphpipe`` for MMT on a cluster of 1,024 devices, 256 micro-batches;
- ``replicas``: a chain of 256 stages on four devices each, whose gradients are summed in 8 buckets;
- ``chain``: a chain of 1,024 stages with 256 micro-batches, 1.5 million actions.

``build`` makes the program (without validation), ``costs`` and ``simulate`` are what their names
say, ``tasks`` puts all tasks in order, for which only who looks at them waits.

    python benchmarks/simulator.py [10000|mmt|replicas|chain …]
"""

from __future__ import annotations

import platform
import resource
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from lightning_gpp.cluster import Link, cluster_preset, uniform_cluster
from lightning_gpp.graph import FEED, StageEdge, StageGraph
from lightning_gpp.planner import PLANNERS, PlanRequest
from lightning_gpp.planner.plan.plan_graph import plan_graph
from lightning_gpp.planner.step_time.pipeline_run import num_microbatches
from lightning_gpp.schedule import Program, build_program
from lightning_gpp.simulate import (
    Bucket,
    MessageBytes,
    ProgramCosts,
    StageCosts,
    program_costs,
    simulate,
)
from lightning_gpp.workloads import WORKLOADS

Result = TypeVar("Result")
Case = tuple[Callable[[], Program], Callable[[Program], ProgramCosts]]

NUM_DEVICES, NUM_MICROBATCHES = 1024, 256


def main(names: list[str]) -> None:
    """Prints a line for every program."""
    print(f"{platform.machine()}, Python {platform.python_version()}; CPU seconds")
    print("program    actions    build    costs simulate    tasks   us/action   MB at most    step")
    for name in names:
        build, costs_of = CASES[name]()
        program, build_s = timed(build)
        costs, costs_s = timed(lambda: costs_of(program))  # noqa: B023
        found, simulate_s = timed(lambda: simulate(program, costs))  # noqa: B023
        _, tasks_s = timed(lambda: len(found.tasks))  # noqa: B023
        count = sum(map(len, program.actions))
        seconds = "".join(f"{s:9.2f}" for s in (build_s, costs_s, simulate_s, tasks_s))
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"{name:8} {count:9}{seconds} {1e6 * simulate_s / count:11.2f} {memory:12.0f}"
            f"  {found.step_s:.4g} s",
            flush=True,
        )


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """What a function gives, and its CPU seconds."""
    start_s = time.process_time()
    found = work()
    return found, time.process_time() - start_s


def chain(num_stages: int, num_microbatches: int, replicas: int = 1) -> Case:
    """A chain with a stage on every device, or on so many of them; the last one is on one."""
    feed = StageEdge(FEED, 0, ("x",), has_backward=False)
    edges = (StageEdge(i, i + 1, ("h",)) for i in range(num_stages - 1))
    readers = tuple((f"weight{i}", (i,)) for i in range(num_stages))
    stages = StageGraph(num_stages, (feed, *edges), readers)
    homes = [range(i * replicas, (i + 1) * replicas) for i in range(num_stages - 1)]
    homes.append(range((num_stages - 1) * replicas, (num_stages - 1) * replicas + 1))

    def build() -> Program:
        return build_program(
            stages,
            devices=homes,
            num_microbatches=num_microbatches,
            multiples=[replicas] * num_stages,
            check=False,
        )

    def costs_of(program: Program) -> ProgramCosts:
        sizes = dict.fromkeys(program.edge, MessageBytes(1.0))
        cluster = uniform_cluster(len(program.actions), Link(10.0))
        groups = range(len(program.reduce_groups))
        buckets = tuple(Bucket(g, 1.0, eighth / 8) for g in groups for eighth in range(1, 9))
        stage_costs = (StageCosts(1.0, 2.0),) * program.num_stages
        return ProgramCosts(cluster, stage_costs, sizes, sizes, buckets)

    return build, costs_of


def mmt() -> Case:
    """The plan of ``graphpipe`` for MMT on 1,024 V100 of the Summit preset."""
    workload = WORKLOADS["mmt"]()
    cluster = cluster_preset("summit", NUM_DEVICES)
    samples = workload.samples_per_device * NUM_DEVICES
    costs = workload.costs_for(cluster, samples)
    request = PlanRequest(workload.graph, cluster, costs, samples, NUM_MICROBATCHES)
    plan = PLANNERS["graphpipe"](request)
    count = num_microbatches(plan, request)
    return (
        lambda: plan_graph(plan, workload.graph).program(count, check=False),
        lambda _: program_costs(plan, request),
    )


CASES: dict[str, Callable[[], Case]] = {
    "10000": lambda: chain(52, 33),
    "mmt": mmt,
    "replicas": lambda: chain(NUM_DEVICES // 4, NUM_MICROBATCHES, replicas=4),
    "chain": lambda: chain(NUM_DEVICES, NUM_MICROBATCHES),
}

if __name__ == "__main__":
    main(sys.argv[1:] or list(CASES))
