"""The search of ``graphpipe`` against brute force on small models.

The whole step without replicas, by the simulator, against the best plan whose stages may share
devices (``tests/helpers/shared_brute_force.py``), on random series-parallel models with whole
numbers as costs, in the settings of ``tests/helpers/small_requests.py``: on two to four devices, of
one kind or two, with messages that take time, with memory limits, in one host or two. Beside it
``exclusive``: what the published space loses. Losses may be negative, as brute force gives all
stages one size of micro-batches. Some seconds a model of five operators.

    python benchmarks/brute_force.py [operators] [draws] [setting …]

With ``4 30`` (mean, worst):

    equal               -1.0 %   0 %, exclusive -0.6 %  0 %
    three               -3.3 %   2 %, exclusive  7.1 % 21 %
    messages            -7.5 %   0 %, exclusive -2.3 % 16 %
    hosts               -6.6 %   0 %, exclusive  6.6 % 33 %
    memory              -4.2 %   3 %, exclusive -0.7 % 10 %
    two kinds           -3.5 %   2 %, exclusive 13.3 % 31 %
    three of two kinds  -5.8 %   0 %, exclusive  6.1 % 22 %
    four of two kinds   -3.6 %   3 %, exclusive  1.3 % 16 %
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.series_parallel import shapes, tree_of
from helpers.shared_brute_force import best_shared_step_s
from helpers.small_requests import SETTINGS, random_request

from lightning_gpp.planner import PlanRequest, answer
from lightning_gpp.planner.does_not_fit import DoesNotFitError
from lightning_gpp.simulate import simulate_plan


def main(count: int, draws: int, settings: Sequence[str]) -> None:
    """Prints one line for each setting without recomputation."""
    print("setting             models  graphpipe longer than the best            exclusive")
    for setting in settings:
        if SETTINGS[setting].may_recompute:
            continue
        rng = random.Random(f"shared {setting} {count}")
        losses: dict[str, list[float]] = {"graphpipe": [], "graphpipe_exclusive": []}
        for _ in range(draws):
            tree = tree_of(rng.choice(shapes(count)))
            request = replace(random_request(tree, SETTINGS[setting], rng), max_replicas=1)
            best_s = best_shared_step_s(tree, request)
            for planner, lost in losses.items() if best_s < math.inf else ():
                lost.append(planned_step_s(planner, request) / best_s - 1)
        texts = [_summary(lost) for lost in losses.values()]
        print(f"{setting:19} {draws:6}  {texts[0]:41} {texts[1]}", flush=True)


def planned_step_s(planner: str, request: PlanRequest) -> float:
    """Seconds of the step of a planner's plan by the simulator; infinite without a plan."""
    try:
        return simulate_plan(answer(request, planner), request).step_s
    except DoesNotFitError:
        return math.inf


def _summary(losses: Sequence[float]) -> str:
    """How often anything is lost, the mean (of those with a plan) and the worst."""
    found = [loss for loss in losses if loss < math.inf]
    if not found:
        return "-"
    some = sum(loss > 1e-9 for loss in losses) / len(losses)
    no_plan = len(losses) - len(found)
    text = f"in {some:4.0%} mean {sum(found) / len(found):6.2%} worst {max(found):6.1%}"
    return f"{text} no plan {no_plan}" if no_plan else text


if __name__ == "__main__":
    count, draws = [*(int(text) for text in sys.argv[1:3]), *[5, 20][len(sys.argv[1:3]) :]]
    main(count, draws, sys.argv[3:] or list(SETTINGS))
