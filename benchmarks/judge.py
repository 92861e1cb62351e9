"""Judge and simulator side by side: the step of every planner's plan, by both.

Planners choose by what ``evaluate_plan`` says of a step; ``simulate_plan`` plays the program of the
plan, as the runtime runs it. This asks planners about the models of the GraphPipe paper, published
graphs and random models, under both schedules, and says how far the two are apart and whether they
rank plans of one question in another order.

    python benchmarks/judge.py                             # the paper's models, and random ones
    python benchmarks/judge.py --graphs DIR                # also every profile in a folder
    python benchmarks/judge.py --devices 8 --clusters dgx_a100 --workloads dlrm --random 0
    python benchmarks/judge.py --json PLANS                # keeps the plans
    python benchmarks/judge.py --judge PLANS               # judges kept plans, searches nothing

``off`` is the judge's step over the simulator's, less 1. ``order`` counts pairs of plans of a
question whose order the two disagree on, where the simulator's steps differ by more than
``--within``.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path

from lightning_gpp.cluster import Cluster, ClusterLayout, HostGroup, Link, cluster_preset
from lightning_gpp.cost import OpProfile, Profile
from lightning_gpp.graph import GraphInput, ModelGraph, OpNode, Parameter, TensorSpec, Value
from lightning_gpp.jobs.problem.workload_problem import workload_of
from lightning_gpp.jobs.search.searched import search
from lightning_gpp.jobs.search.time_limit import OutOfTimeError, call_within
from lightning_gpp.planner import (
    PLANNERS,
    Plan,
    PlanRequest,
    evaluate_plan,
    plan_from_json,
    plan_request,
    plan_to_json,
)
from lightning_gpp.planner.plan_to_run import PlanQuestion
from lightning_gpp.schedule import SCHEDULES
from lightning_gpp.simulate import simulate_plan
from lightning_gpp.text_table import text_table
from lightning_gpp.units_of_measure import seconds_text

PAPER = (
    *("mmt:num_branches=2", "mmt:num_branches=4", "dlrm", "candle_uno", "transformer"),
    "candle_uno:num_branches=16",
)
RANDOM = "random"
RANDOM_SAMPLES = 8
"""Samples per device of a mini-batch of a random model."""

SHARED = "shared"
"""Hosts whose devices share a bus and a network port, both half duplex."""


@dataclass(frozen=True, slots=True)
class Case:
    """A question to planners.

    Attributes:
        graph: name or file of a model, with options behind a colon; ``random:7`` is a seed.
        cluster: a preset, or ``shared``.
        num_devices: of the cluster.
        schedule: that runs the plan.
        samples: of the mini-batch, per device; 0: the workload's own.
    """

    graph: str
    cluster: str
    num_devices: int
    schedule: str
    samples: int = 0

    @property
    def name(self) -> str:
        """The model, for people."""
        head, _, options = self.graph.partition(":")
        return f"{Path(head).name}{':' * bool(options)}{options}"


@dataclass(frozen=True, slots=True)
class Judged:
    """A plan, and its step by both.

    Attributes:
        case: the question.
        planner: who made it.
        plan: the plan, as JSON; empty where there is none.
        judged_s: step by the judge.
        simulated_s: step by the simulator.
        has_replicas: whether a stage has some.
        error: why there is no plan.
    """

    case: Case
    planner: str
    plan: str = ""
    judged_s: float = 0.0
    simulated_s: float = 0.0
    has_replicas: bool = False
    error: str = ""

    @property
    def off(self) -> float:
        """How much longer the judge takes the step for."""
        return self.judged_s / self.simulated_s - 1


def arguments() -> argparse.Namespace:
    """What is asked for on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="*", default=PAPER, help="models with their options")
    parser.add_argument("--graphs", type=Path, help="also every .txt and .json below this folder")
    parser.add_argument("--random", type=int, default=8, help="so many random models")
    parser.add_argument("--seed", type=int, default=0, help="of the first random model")
    parser.add_argument("--devices", type=int, nargs="+", default=(4, 8))
    parser.add_argument("--clusters", nargs="+", default=("summit", SHARED))
    parser.add_argument("--schedules", nargs="+", default=("gpipe", "1f1b"), choices=[*SCHEDULES])
    parser.add_argument("--samples", type=int, nargs="+", default=(0,), help="per device")
    parser.add_argument("--planners", nargs="+", default=[*PLANNERS], choices=[*PLANNERS])
    parser.add_argument("--limit-s", type=float, default=60.0, help="for one search")
    parser.add_argument("--within", type=float, default=0.02, help="a difference that is none")
    parser.add_argument("--json", type=Path, help="write all plans to this file")
    parser.add_argument("--judge", type=Path, help="such a file: search nothing")
    parser.add_argument("--all", action="store_true", help="show all plans, not only those off")
    return parser.parse_args()


def main() -> None:
    """Judges plans, and prints a table of them and the largest difference."""
    given = arguments()
    found = list(again(given.judge) if given.judge else searched(given))
    if given.json:
        rows = [asdict(row) for row in found]
        given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(report(found, given.within, show_all=given.all))


def searched(given: argparse.Namespace) -> Iterator[Judged]:
    """What every planner answers, each in a process of its own."""
    for case in cases(given):
        for planner in given.planners:
            try:
                yield call_within(given.limit_s, answered, case, planner)
            except (OutOfTimeError, RuntimeError) as error:
                yield Judged(case, planner, error=str(error).strip().rpartition("\n")[2])


def again(path: Path) -> Iterator[Judged]:
    """Kept plans, judged anew."""
    known: tuple[Case, PlanRequest] | None = None
    for row in json.loads(path.read_text(encoding="utf-8")):
        case = Case(**row["case"])
        if row["error"]:
            yield Judged(case, row["planner"], error=row["error"])
            continue
        if known is None or known[0] != case:
            known = case, question(case)
        yield judged(case, row["planner"], plan_from_json(json.loads(row["plan"])), known[1])


def cases(given: argparse.Namespace) -> Iterator[Case]:
    """All questions."""
    files = sorted(given.graphs.rglob("*")) if given.graphs else []
    graphs = [
        *given.workloads,
        *(str(path) for path in files if path.suffix == ".txt"),
        *(f"{path}:samples=128" for path in files if path.suffix == ".json"),
        *(f"{RANDOM}:{given.seed + number}" for number in range(given.random)),
    ]
    for graph in graphs:
        for cluster in given.clusters:
            for num_devices in given.devices:
                for samples in given.samples:
                    for schedule in given.schedules:
                        yield Case(graph, cluster, num_devices, schedule, samples)


def answered(case: Case, planner: str) -> Judged:
    """A planner's answer, judged."""
    request = question(case)
    found = search(PlanQuestion(request, planner, case.schedule))
    if found.evaluation is None:
        return Judged(case, planner, error=found.failure)
    return judged(case, planner, found.evaluation.plan, request)


def judged(case: Case, planner: str, plan: Plan, request: PlanRequest) -> Judged:
    """A plan's step by both."""
    return Judged(
        case,
        planner,
        json.dumps(plan_to_json(plan)),
        evaluate_plan(plan, request).step_s,
        simulate_plan(plan, request).step_s,
        any(stage.num_replicas > 1 for stage in plan.stages),
    )


def question(case: Case) -> PlanRequest:
    """What planners are asked."""
    graph, _, options = case.graph.partition(":")
    cluster = cluster_of(case)
    if graph == RANDOM:
        rng = random.Random(int(options))
        model = random_model(rng)
        samples = case.samples or RANDOM_SAMPLES
        return plan_request(
            model,
            replace(cluster, devices=tuple(replace(d, kind="any") for d in cluster.devices)),
            minibatch_size=samples * case.num_devices,
            costs=random_profile(model, rng),
            schedule=case.schedule,
        )
    pairs = (item.split("=") for item in options.split(",") if item)
    workload = workload_of(graph, {name: int(value) for name, value in pairs})
    minibatch_size = (case.samples or workload.samples_per_device) * case.num_devices
    return plan_request(
        workload.graph,
        cluster,
        minibatch_size=minibatch_size,
        costs=workload.costs_for(cluster, minibatch_size),
        schedule=case.schedule,
    )


def cluster_of(case: Case) -> Cluster:
    """The cluster of a case."""
    if case.cluster != SHARED:
        return cluster_preset(case.cluster, case.num_devices)
    group = HostGroup("Tesla V100-SXM2-16GB", devices_per_host=4, memory_bytes=16 * 10**9)
    bus = Link(11e9, 10e-6, is_shared=True, is_full_duplex=False)
    port = Link(11e9, 20e-6, is_shared=True, is_full_duplex=False)
    return ClusterLayout((group,), bus, port).cluster(case.num_devices)


def random_model(rng: random.Random) -> ModelGraph:
    """Operators that read some of the last ones or any earlier one; large and small parameters."""
    count = rng.randint(6, 24)
    nodes: list[OpNode] = []
    names = ["x"]
    for number in range(count):
        reads = {rng.choice(names[-3:])} | ({rng.choice(names)} if rng.random() < 0.3 else set())
        spec = TensorSpec((1, rng.choice((1_000, 100_000, 1_000_000))), "float32", 0)
        nodes.append(
            OpNode(
                f"op{number}",
                f"part{number}",
                f"part{number}",
                tuple(name for name in names if name in reads),
                (Value(f"v{number}", (spec,)),),
                (f"w{number}",) if rng.random() < 0.8 else (),
            )
        )
        names.append(f"v{number}")
    read = {name for node in nodes for name in node.inputs}
    return ModelGraph(
        (GraphInput(Value("x", (TensorSpec((1, 1000), "float32", 0),)), requires_grad=False),),
        tuple(nodes),
        tuple(f"v{number}" for number in range(count) if f"v{number}" not in read),
        tuple(
            Parameter(name, 4 * rng.choice((1_000, 1_000_000, 20_000_000)))
            for node in nodes
            for name in node.parameters
        ),
    )


def random_profile(graph: ModelGraph, rng: random.Random) -> Profile:
    """Milliseconds per sample, from one to a hundred, and some operators that take nothing."""
    operators = {}
    for node in graph:
        forward_s = rng.choice((0.0, *(10 ** rng.uniform(-4, -2) for _ in range(4))))
        backward_s = forward_s * rng.choice((1.0, 2.0, 2.5))
        operators[node.name] = OpProfile(forward_s, backward_s, rng.randint(10**3, 10**7))
    return Profile(operators, 1, "any")


def report(found: Sequence[Judged], within: float, *, show_all: bool) -> str:
    """The plans that are off, what is largest, and how often plans change places."""
    planned = [row for row in found if not row.error]
    shown = planned if show_all else [row for row in planned if abs(row.off) > within]
    header = ["model", "cluster", "devices", "schedule", "planner", "replicas", "judge"]
    left = {"model", "cluster", "schedule", "planner", "replicas"}
    table = text_table([*header, "simulator", "off"], [cells(row) for row in shown], left=left)
    lines = [table] if shown else []
    for with_replicas in (False, True):
        some = [row for row in planned if row.has_replicas == with_replicas]
        if some:
            worst = max(some, key=lambda row: abs(row.off))
            name = "with replicas" if with_replicas else "without replicas"
            above = sum(abs(row.off) > within for row in some)
            lines.append(
                f"{len(some)} plans {name}: {above} off by more than {within:.0%}, the largest "
                f"{worst.off:+.2%} ({worst.planner}, {worst.case.name}, {worst.case.num_devices} "
                f"devices, {worst.case.cluster}, {worst.case.schedule})"
            )
    swapped, pairs, worse = orders(planned, within)
    lines.append(
        f"order: {swapped} of {pairs} pairs of plans change places; the plan that the judge finds "
        f"best is by the simulator at most {worse:.2%} slower than the best"
    )
    return "\n".join(lines)


def cells(row: Judged) -> list[str]:
    """Cells of a row."""
    case = row.case
    return [
        *(case.name, case.cluster, str(case.num_devices), case.schedule, row.planner),
        "yes" if row.has_replicas else "",
        *(seconds_text(row.judged_s), seconds_text(row.simulated_s), f"{row.off:+.2%}"),
    ]


def orders(planned: Sequence[Judged], within: float) -> tuple[int, int, float]:
    """Pairs of plans of a question that change places, all pairs, and what choosing costs."""
    swapped = pairs = 0
    worse = 0.0
    for case in dict.fromkeys(row.case for row in planned):
        rows = [row for row in planned if row.case == case]
        chosen = min(rows, key=lambda row: row.judged_s)
        worse = max(worse, chosen.simulated_s / min(row.simulated_s for row in rows) - 1)
        for one, other in combinations(rows, 2):
            quick, slow = sorted((one, other), key=lambda row: row.simulated_s)
            if slow.simulated_s > quick.simulated_s * (1 + within):
                pairs += 1
                swapped += slow.judged_s < quick.judged_s
    return swapped, pairs, worse


if __name__ == "__main__":
    main()
