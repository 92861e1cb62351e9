"""The searches of ``graphpipe_exclusive`` and ``graphpipe`` against brute force on small models.

Every series-parallel model (up to isomorphism), with random whole numbers as costs, in every
setting of ``tests/helpers/small_requests.py``: on two to four devices, of one kind or two, with
messages that take time, with memory limits, with recomputation, in one host or two. For each the
bottleneck that the division of the line finds is compared with the best of all divisions of the
line, which it must reach (and where nothing fits into memory, both must say so), and with the best
of all divisions whatsoever, whose mean and worst loss are printed: what a climb is for.

    python benchmarks/brute_force.py [operators] [draws] [setting …]
    python benchmarks/brute_force.py --shared [operators] [draws] [setting …]

With ``--shared`` the whole step of ``graphpipe`` without replicas, by the simulator, against the
best plan whose stages may share devices (``tests/helpers/shared_brute_force.py``), on random models
of that many operators; ``exclusive`` is what the published space loses. Losses may be negative, as
brute force gives all stages one size of micro-batches. Some seconds a model of five operators.
With ``--shared 4 30`` (mean, worst):

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

import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.brute_force import INFEASIBLE, BruteForce, found_bottleneck_s, line_divisions
from helpers.series_parallel import divisions, final_stages, shapes, tree_of
from helpers.shared_brute_force import best_shared_step_s
from helpers.small_requests import SETTINGS, random_request

from lightning_gpp.planner import PlanRequest, answer
from lightning_gpp.planner.base import DoesNotFitError
from lightning_gpp.simulate import simulate_plan

SPACES = ((4, False), (2, True))
"""Smallest micro-batch, and whether replicas take turns."""


def main(most: int, draws: int, settings: Sequence[str]) -> None:
    """Prints one line for each setting and number of operators."""
    print("setting             operators questions infeasible missed  loss against any division")
    for setting in settings:
        for count in range(1, most + 1):
            print(f"{setting:19} {count:9} {row(setting, count, draws)}", flush=True)


def row(setting: str, count: int, draws: int) -> str:
    """Questions, those where nothing fits, missed optima, and the loss against any division."""
    rng = random.Random(f"{setting} {count}")
    num_infeasible = missed = 0
    losses: list[float] = []
    for shape in shapes(count):
        tree = tree_of(shape)
        everything = [(stages, final_stages(tree, stages)) for stages in divisions(tree)]
        for _ in range(draws):
            request = random_request(tree, SETTINGS[setting], rng)
            for size, take_turns in SPACES:
                in_line = BruteForce(request, size, take_turns=take_turns, in_line=True)
                found_s = found_bottleneck_s(request, size, take_turns=take_turns)
                best_s = in_line.smallest_bottleneck_s(line_divisions(request))
                missed += not _is_equal(found_s, best_s)
                best = BruteForce(request, size, take_turns=take_turns)
                any_s = best.smallest_bottleneck_s(everything)
                if any_s == INFEASIBLE:
                    num_infeasible += 1
                    continue
                losses.append(found_s / any_s - 1)
    num_questions = num_infeasible + len(losses)
    return f"{num_questions:9} {num_infeasible:10} {missed:6}  {_summary(losses)}"


def shared(count: int, draws: int, settings: Sequence[str]) -> None:
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
            for planner, lost in losses.items() if best_s < INFEASIBLE else ():
                lost.append(planned_step_s(planner, request) / best_s - 1)
        texts = [_summary(lost) for lost in losses.values()]
        print(f"{setting:19} {draws:6}  {texts[0]:41} {texts[1]}", flush=True)


def planned_step_s(planner: str, request: PlanRequest) -> float:
    """Seconds of the step of a planner's plan by the simulator; infinite without a plan."""
    try:
        return simulate_plan(answer(request, planner), request).step_s
    except DoesNotFitError:
        return INFEASIBLE


def _is_equal(one: float, other: float) -> bool:
    return one == other or abs(one / other - 1) < 1e-9


def _summary(losses: Sequence[float]) -> str:
    """How often anything is lost, the mean (of those with a plan) and the worst."""
    found = [loss for loss in losses if loss < INFEASIBLE]
    if not found:
        return "-"
    some = sum(loss > 1e-9 for loss in losses) / len(losses)
    no_plan = len(losses) - len(found)
    text = f"in {some:4.0%} mean {sum(found) / len(found):6.2%} worst {max(found):6.1%}"
    return f"{text} no plan {no_plan}" if no_plan else text


if __name__ == "__main__":
    given = [text for text in sys.argv[1:] if text != "--shared"]
    is_shared = len(given) < len(sys.argv) - 1
    numbers = [int(text) for text in given[:2]]
    numbers += ([5, 20] if is_shared else [7, 1])[len(numbers) :]
    (shared if is_shared else main)(*numbers, given[2:] or list(SETTINGS))
