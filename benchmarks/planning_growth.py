"""How long a plan takes with the number of operators: a chain, and four towers that join.

Operators come in threes: a linear one with parameters, an activation and a sum, with times drawn
once. A search is one thread: the figures are processor time. Beside the predicted step stands the
work divided by the devices, which no plan beats.

    python benchmarks/planning_growth.py
    python benchmarks/planning_growth.py --operators 3000 --models chain --profile
"""

from __future__ import annotations

import argparse
import cProfile
import platform
import pstats
import random
import time

from lightning_gpp.cluster import cluster_preset
from lightning_gpp.cost import OpProfile, Profile
from lightning_gpp.graph import GraphInput, ModelGraph, OpNode, Parameter, TensorSpec, Value
from lightning_gpp.planner import PLANNERS, ask, evaluate_plan, plan_request
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.text_table import text_table
from lightning_gpp.units_of_measure import seconds_text

OPERATORS = (100, 300, 1000, 3000, 10_000)
MODELS = {"chain": 1, "four towers": 4}
SAMPLES_PER_DEVICE = 8


def main() -> None:
    """Prints a line per question."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--operators", type=int, nargs="+", default=OPERATORS)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--devices", type=int, nargs="+", default=(4, 16))
    parser.add_argument("--planner", default="graphpipe", choices=sorted(PLANNERS))
    parser.add_argument("--profile", action="store_true", help="what takes the time")
    given = parser.parse_args()
    print(f"summit; {platform.machine()}, Python {platform.python_version()}")
    rows = []
    for model in given.models:
        for num_devices in given.devices:
            for count in given.operators:
                request = question(model, count, num_devices)
                start_s = time.process_time()
                profile = cProfile.Profile()
                if given.profile:
                    profile.enable()
                plan = ask(request, given.planner).best
                profile.disable()
                took_s = time.process_time() - start_s
                if given.profile:
                    pstats.Stats(profile).sort_stats("tottime").print_stats(25)
                step_s = evaluate_plan(plan, request).step_s
                rows.append(
                    [
                        *(model, f"{num_devices}", f"{count}", seconds_text(took_s)),
                        *(seconds_text(step_s), f"{step_s / least_s(request):.3f}"),
                    ]
                )
                print(" ".join(rows[-1]), flush=True)
    header = ["model", "devices", "operators", "planned in", "step", "of work / devices"]
    print(text_table(header, rows, left={"model"}))


def question(model: str, num_operators: int, num_devices: int) -> PlanRequest:
    """The question of so many operators, always the same one."""
    rng = random.Random(num_operators)
    spec = (TensorSpec((1, 1024), "float32", 0),)
    nodes: list[OpNode] = []
    parameters, profile, ends = [], {}, []
    num_towers = MODELS[model]
    for tower in range(num_towers):
        reads = "x"
        for depth in range((num_operators - 1) // num_towers):
            name, weights = f"t{tower}_{depth}", ()
            if depth % 3 == 0:
                parameters.append(Parameter(f"{name}.weight", 4 * 1024**2))
                weights = (parameters[-1].name,)
            target = ("torch.nn.Linear", "torch.tanh", "torch.add")[depth % 3]
            nodes.append(OpNode(name, target, "", (reads,), (Value(f"{name}_out", spec),), weights))
            forward_s = (100e-6, 5e-6, 5e-6)[depth % 3] * rng.choice((0.5, 1.0, 2.0))
            profile[name] = OpProfile(forward_s, 2 * forward_s, 4096)
            reads = f"{name}_out"
        ends.append(reads)
    nodes.append(OpNode("join", "torch.add", "", tuple(ends), (Value("y", spec),)))
    profile["join"] = OpProfile(5e-6, 10e-6, 4096)
    graph = ModelGraph((GraphInput(Value("x", spec)),), tuple(nodes), ("y",), tuple(parameters))
    return plan_request(
        graph,
        cluster_preset("summit", num_devices),
        minibatch_size=SAMPLES_PER_DEVICE * num_devices,
        costs=Profile(profile, 1, "any"),
    )


def least_s(request: PlanRequest) -> float:
    """Work of a step divided over all devices."""
    operators = request.costs.profiles[0].operators.values()
    work_s = sum(item.forward_s + item.backward_s for item in operators)
    return work_s * request.minibatch_size / request.num_devices


if __name__ == "__main__":
    main()
