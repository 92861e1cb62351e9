"""All forwards first against 1F1B: the same plans under both schedules, and why one is longer.

The plans are ``graphpipe``'s for the one schedule and for the other, on a cluster whose memory sets
no limit; each is judged (``evaluate_plan``) and simulated (``simulate_plan``) under both.

    python benchmarks/schedules.py                                # the paper's models, 4 to 16 GPUs
    python benchmarks/schedules.py --workloads dlrm --devices 4
    python benchmarks/schedules.py --workloads mmt:num_branches=2 --devices 8 \
        --microbatches 4 8 16 32

Times of all forwards first (``gpipe``) are in parts of those of 1F1B for the same plan, ``own`` for
the plan that was made for 1F1B: with it the two rows of a case show what a user of either schedule
gets. A step is as long as its busiest device computes (``busy``) and waits. All forwards first lets
it wait for the *turn*, from its last forward to its first backward: its last micro-batch goes all
the way to the loss and back. 1F1B does further forwards in the meantime, but in every micro-batch
it waits for messages both ways. ``order`` is the step over what no order of the same actions can
beat: stages begin whatever has arrived, a device sends any number of messages at a time, and sums
of gradients begin with the last backward.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lightning_gpp.cluster import Cluster, all_reduce_s, cluster_preset
from lightning_gpp.jobs.problem.workload_problem import workload_of
from lightning_gpp.planner import PlanRequest, ask, evaluate_plan
from lightning_gpp.planner.plan.plan import Plan
from lightning_gpp.planner.plan.plan_graph import plan_graph
from lightning_gpp.planner.step_time.pipeline_run import num_microbatches
from lightning_gpp.schedule import Action, Program, last_backward
from lightning_gpp.simulate import ProgramCosts, Simulation, TaskKind, program_costs, simulate_plan
from lightning_gpp.simulate.engine.message_costs import compute_s, message_costs
from lightning_gpp.text_table import text_table
from lightning_gpp.units_of_measure import bytes_text, seconds_text

MODELS = ("mmt:num_branches=2", "mmt:num_branches=4", "dlrm", "candle_uno", "transformer")
MIXED, HALVED = SCHEDULES = ("1f1b", "gpipe")


@dataclass(frozen=True, slots=True)
class Row:
    """A plan under both schedules.

    Attributes:
        workload: the model.
        num_devices: devices of the cluster.
        made_for: schedule that the plan was made for.
        num_microbatches: most that a stage takes of a mini-batch.
        num_stages: stages of the plan.
        judged_s: step by ``evaluate_plan``, of 1F1B and of all forwards first.
        simulated_s: step by ``simulate_plan``, likewise.
        peak_bytes: memory of the fullest device, likewise.
        busy_s: seconds that the busiest device computes.
        turn_s: seconds from its last forward to its first backward with all forwards first.
        least_s: step that no order with all forwards first can beat.
        own: simulated step with all forwards first over that of 1F1B with the plan made for it.
    """

    workload: str
    num_devices: int
    made_for: str
    num_microbatches: int
    num_stages: int
    judged_s: tuple[float, float]
    simulated_s: tuple[float, float]
    peak_bytes: tuple[int, int]
    busy_s: float
    turn_s: float
    least_s: float
    own: float = 1.0


def arguments() -> argparse.Namespace:
    """What is asked for on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", default=MODELS, help="models with their options")
    parser.add_argument("--devices", type=int, nargs="+", default=(4, 8, 16))
    parser.add_argument("--microbatches", type=int, nargs="+", default=(None,), help="their number")
    parser.add_argument("--cluster", default="summit", help="a preset")
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    return parser.parse_args()


def main() -> None:
    """Makes the plans and prints a table."""
    given = arguments()
    print(f"cluster {given.cluster}; {platform.machine()}, Python {platform.python_version()}\n")
    found = []
    for workload in given.workloads:
        for num_devices in given.devices:
            cluster = without_limits(cluster_preset(given.cluster, num_devices))
            for count in given.microbatches:
                found += rows(workload, cluster, count)
    print(text_table(HEADER, [cells(row) for row in found], left={"model"}, max_width=200))
    if given.json:
        text = json.dumps([asdict(row) for row in found], indent=2)
        given.json.write_text(text + "\n", encoding="utf-8")


def without_limits(cluster: Cluster) -> Cluster:
    """The cluster with devices whose memory is not known."""
    devices = tuple(replace(device, memory_bytes=None) for device in cluster.devices)
    return replace(cluster, devices=devices)


def rows(workload: str, cluster: Cluster, count: int | None) -> Iterator[Row]:
    """The plan for 1F1B and that for all forwards first, both under both."""
    request = question(workload, cluster, count)
    reference_s = None
    for made_for in SCHEDULES:
        plan = ask(replace(request, schedule=made_for), "graphpipe").best
        found = row(workload, made_for, plan, request)
        if reference_s is None:
            reference_s = found.simulated_s[0]
        yield replace(found, own=found.simulated_s[1] / reference_s)


def question(workload: str, cluster: Cluster, count: int | None) -> PlanRequest:
    """What the planner is asked."""
    name, _, options = workload.partition(":")
    pairs = (item.split("=") for item in options.split(",") if item)
    model = workload_of(name, {key: int(value) for key, value in pairs})
    minibatch_size = model.samples_per_device * cluster.num_devices
    costs = model.costs_for(cluster, minibatch_size)
    return PlanRequest(model.graph, cluster, costs, minibatch_size, num_microbatches=count)


def row(workload: str, made_for: str, plan: Plan, request: PlanRequest) -> Row:
    """A plan under both schedules."""
    asked = [replace(request, schedule=schedule) for schedule in SCHEDULES]
    mixed, halved = (evaluate_plan(plan, each) for each in asked)
    simulations = [simulate_plan(plan, each) for each in asked]
    busiest = max(halved.devices, key=lambda device: device.busy_s)
    return Row(
        workload,
        request.num_devices,
        made_for,
        num_microbatches(plan, request) // min(s.microbatch_multiple for s in plan.stages),
        plan.num_stages,
        (mixed.step_s, halved.step_s),
        (simulations[0].step_s, simulations[1].step_s),
        (mixed.peak_memory_bytes, halved.peak_memory_bytes),
        busiest.busy_s,
        turn_s(simulations[1], busiest.device),
        least_s(halved_program(plan, asked[1]), program_costs(plan, asked[1])),
    )


def turn_s(simulation: Simulation, device: int) -> float:
    """Seconds from the last forward of a device to its first backward."""
    tasks = [task for task in simulation.tasks if task.device == device]
    last_s = max(task.end_s for task in tasks if task.kind is TaskKind.FORWARD)
    return min(task.start_s for task in tasks if task.kind is TaskKind.BACKWARD) - last_s


def halved_program(plan: Plan, request: PlanRequest) -> Program:
    """The program of a plan under the schedule of the request."""
    count = num_microbatches(plan, request)
    return plan_graph(plan, request.graph).program(count, schedule=request.schedule)


def least_s(program: Program, costs: ProgramCosts) -> float:
    """The step where messages wait for no other, and sums begin with the last backward.

    Every stage begins its micro-batches as early as they can be there, so where each has a device
    of its own no other order is done sooner.
    """
    clock_s = [0.0] * len(program.actions)
    start_s: dict[Action, float] = {}
    arrival_s: dict[tuple[int, int, bool, int], float] = {}
    left = [deque(actions) for actions in program.actions]
    while any(left):
        for device, actions in enumerate(left):
            while actions and (not actions[0].kind.is_receive or actions[0].message in arrival_s):
                action = actions.popleft()
                start_s[action] = clock_s[device]
                if action.kind.is_receive:
                    clock_s[device] = max(clock_s[device], arrival_s[action.message])
                elif action.kind.is_send:
                    source, target, back, _ = action.message
                    of_edge = message_costs(program, costs, source, target, is_gradient=back)
                    transfer_s = of_edge.transfer_s(program.num_units(action))
                    arrival_s[action.message] = clock_s[device] + transfer_s
                elif action.kind.is_compute:
                    clock_s[device] += compute_s(costs, action)
    return max(*clock_s, *summed_s(program, costs, start_s))


def summed_s(
    program: Program, costs: ProgramCosts, start_s: Mapping[Action, float]
) -> Iterator[float]:
    """When the gradients of replicas are summed at the earliest, stage by stage."""
    for index, group in enumerate(program.reduce_groups):
        if group.stage is not None:
            finals = (last_backward(program, device, group.stage) for device in group.devices)
            begin_s = max(start_s[action] for action in finals if action is not None)
            yield begin_s + sum(
                all_reduce_s(costs.cluster, group.devices, bucket.size_bytes, costs.all_reduce)
                for bucket in costs.buckets
                if bucket.group == index
            )


HEADER = (
    *("model", "devices", "plan for", "micro-batches", "stages", "1F1B judged", "gpipe"),
    *("1F1B simulated", "gpipe", "own", "order", "busy", "turn", "1F1B memory", "gpipe"),
)


def cells(row: Row) -> list[str]:
    """Cells of a row."""
    return [
        row.workload,
        f"{row.num_devices}",
        row.made_for,
        f"{row.num_microbatches}",
        f"{row.num_stages}",
        seconds_text(row.judged_s[0]),
        f"{row.judged_s[1] / row.judged_s[0]:.3f}",
        seconds_text(row.simulated_s[0]),
        f"{row.simulated_s[1] / row.simulated_s[0]:.3f}",
        f"{row.own:.3f}",
        f"{row.simulated_s[1] / row.least_s:.3f}",
        seconds_text(row.busy_s),
        seconds_text(row.turn_s),
        bytes_text(row.peak_bytes[0]),
        f"{row.peak_bytes[1] / row.peak_bytes[0]:.2f}",
    ]


if __name__ == "__main__":
    main()
