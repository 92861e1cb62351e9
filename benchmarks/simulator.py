"""How fast programs are made and simulated: actions per second, in CPU seconds of one process.

Three programs: a chain of about 10,000 actions; MMT on 1,024 devices, a plan of ``graphpipe`` for
32 of them with every replica 32 times; and a chain of 1,024 stages with 256 micro-batches (1.5
million actions). ``build`` makes the program (without validation), ``costs`` and ``simulate`` are
what their names say, ``tasks`` puts all tasks in order, for which only who looks at them waits.

    python benchmarks/simulator.py [10000|mmt|chain …]
"""

from __future__ import annotations

import platform
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from lightning_gpp.cluster import Link, cluster_preset, uniform_cluster
from lightning_gpp.graph import FEED, StageEdge, StageGraph
from lightning_gpp.planner import PLANNERS, Plan, PlanRequest, Stage
from lightning_gpp.planner.plan_graph import plan_graph
from lightning_gpp.schedule import Program, build_program
from lightning_gpp.simulate import (
    MessageBytes,
    ProgramCosts,
    StageCosts,
    program_costs,
    simulate,
)
from lightning_gpp.workloads import WORKLOADS, Workload

Result = TypeVar("Result")
Case = tuple[Callable[[], Program], Callable[[Program], ProgramCosts]]

NUM_DEVICES, NUM_MICROBATCHES = 1024, 256
WIDER = 32


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
            f"{name:7} {count:10}{seconds} {1e6 * simulate_s / count:11.2f} {memory:12.0f}"
            f"  {found.step_s:.4g} s",
            flush=True,
        )


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """What a function gives, and its CPU seconds."""
    start_s = time.process_time()
    found = work()
    return found, time.process_time() - start_s


def chain(num_stages: int, num_microbatches: int) -> Case:
    """A chain with a stage on every device."""
    feed = StageEdge(FEED, 0, ("x",), has_backward=False)
    edges = (StageEdge(i, i + 1, ("h",)) for i in range(num_stages - 1))
    stages = StageGraph(num_stages, (feed, *edges))

    def build() -> Program:
        return build_program(
            stages, devices=range(num_stages), num_microbatches=num_microbatches, check=False
        )

    def costs_of(program: Program) -> ProgramCosts:
        sizes = dict.fromkeys(program.edge, MessageBytes(1.0))
        cluster = uniform_cluster(num_stages, Link(10.0))
        return ProgramCosts(cluster, (StageCosts(1.0, 2.0),) * num_stages, sizes, sizes)

    return build, costs_of


def mmt() -> Case:
    """MMT on 1,024 V100 of the Summit preset."""
    workload = WORKLOADS["mmt"]()
    few = request(workload, NUM_DEVICES // WIDER, NUM_MICROBATCHES // WIDER)
    many = request(workload, NUM_DEVICES, NUM_MICROBATCHES)
    plan = wider(PLANNERS["graphpipe"](few))
    return (
        lambda: plan_graph(plan, many.graph).program(NUM_MICROBATCHES, check=False),
        lambda _: program_costs(plan, many),
    )


def request(workload: Workload, num_devices: int, num_microbatches: int) -> PlanRequest:
    """The question for so many devices."""
    cluster = cluster_preset("summit", num_devices)
    samples = workload.samples_per_device * num_devices
    costs = workload.costs_for(cluster, samples)
    return PlanRequest(workload.graph, cluster, costs, samples, num_microbatches)


def wider(plan: Plan) -> Plan:
    """Every replica 32 times, with micro-batches of 32 times the size."""
    return Plan(tuple(map(_wider, plan.stages)), num_microbatches=NUM_MICROBATCHES)


def _wider(stage: Stage) -> Stage:
    devices = tuple(device * WIDER + i for device in stage.devices for i in range(WIDER))
    return replace(stage, devices=devices, microbatch_multiple=stage.microbatch_multiple * WIDER)


CASES: dict[str, Callable[[], Case]] = {
    "10000": lambda: chain(52, 33),
    "mmt": mmt,
    "chain": lambda: chain(NUM_DEVICES, NUM_MICROBATCHES),
}

if __name__ == "__main__":
    main(sys.argv[1:] or list(CASES))
