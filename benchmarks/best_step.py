"""The whole step of ``graphpipe`` against the best plan of any shape, found by trying all of them.

Small random models in the settings of ``tests/helpers/small_requests.py``; every plan is judged by
``evaluate_plan``, with real links, placements and memory. What is lost is what the space of stages,
the search by bottleneck, the slowest link for all messages and placement afterwards cost together.

    python benchmarks/best_step.py [models] [operators …]

Of 30 random models of four operators the step was longer than the best one (mean of all, worst):
equal devices in 47 % (4.8 %, 26 %), with messages in 57 % (3.8 %, 18 %), in two hosts, where
placement counts, in 43 % (5.9 %, 40 %).
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.best_step import best_step_s
from helpers.series_parallel import shapes, tree_of
from helpers.small_requests import SETTINGS, random_request

from lightning_gpp.planner import PlanRequest, answer, evaluate_plan

WITHOUT_RECOMPUTATION = [name for name, one in SETTINGS.items() if not one.may_recompute]


def main(num_models: int, counts: Sequence[int]) -> None:
    """Prints a line for each setting and number of operators."""
    print("setting             operators  models  infeasible  no plan  longer than the best")
    for setting in WITHOUT_RECOMPUTATION:
        for count in counts:
            print(f"{setting:19} {count:9} {row(setting, count, num_models)}", flush=True)


def row(setting: str, count: int, num_models: int) -> str:
    """Models, those where nothing fits, those where only brute force has a plan, and the loss."""
    rng = random.Random(f"{setting} {count}")
    losses: list[float] = []
    num_infeasible = num_missed = 0
    for _ in range(num_models):
        tree = tree_of(rng.choice(shapes(count)))
        request = random_request(tree, SETTINGS[setting], rng)
        best_s, found_s = best_step_s(tree, request), planned_step_s(request)
        num_infeasible += best_s == math.inf
        num_missed += best_s < found_s == math.inf
        if found_s < math.inf:
            losses.append(found_s / best_s - 1)
    text = f"{num_models:7} {num_infeasible:11} {num_missed:8}"
    if not losses:
        return text
    some = sum(loss > 1e-9 for loss in losses) / len(losses)
    mean = sum(losses) / len(losses)
    return f"{text}  in {some:4.0%} mean {mean:6.2%} worst {max(losses):6.1%}"


def planned_step_s(request: PlanRequest) -> float:
    """Seconds of a step of ``graphpipe``; infinite where it finds nothing that fits."""
    try:
        return evaluate_plan(answer(request, "graphpipe"), request).step_s
    except ValueError:
        return math.inf


if __name__ == "__main__":
    numbers = [int(text) for text in sys.argv[1:]]
    main(numbers[0] if numbers else 40, numbers[1:] or [3, 4, 5])
