"""``graphpipe`` against brute force on all series-parallel models of up to seven operators.

Every model (up to isomorphism), with random whole numbers as costs, on 2, 3 and 4 devices. For each
the planner's bottleneck is compared with the best of all divisions of its stated space, which it
must reach, and with the best of all divisions whatsoever, whose mean and worst loss are printed.
Messages are free and memory is unlimited. A minute or so for seven operators and one draw.

    python benchmarks/brute_force.py [operators] [draws]
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.brute_force import (
    divisions,
    found_bottlenecks_s,
    is_in_space,
    random_request,
    shapes,
    smallest_bottleneck_s,
    tree_of,
)


def main(most: int, draws: int) -> None:
    """Prints one line for each number of operators and devices."""
    print("operators devices models  missed  loss of the tree alone   loss with the line")
    for count in range(1, most + 1):
        for num_devices in (2, 3, 4):
            print(f"{count:9} {num_devices:7} {row(count, num_devices, draws)}")


def row(count: int, num_devices: int, draws: int) -> str:
    """Models, optima that were missed, mean and worst loss against any division."""
    rng = random.Random(1000 * count + num_devices)
    missed, losses, losses_with_line = 0, [], []
    for shape in shapes(count):
        tree = tree_of(shape)
        everything = divisions(tree)
        considered = [stages for stages in everything if is_in_space(tree, stages)]
        for _ in range(draws):
            request = random_request(tree, num_devices, rng)
            found, in_line = found_bottlenecks_s(request)
            missed += abs(found / smallest_bottleneck_s(request, considered) - 1) > 1e-9
            any_s = smallest_bottleneck_s(request, everything)
            losses.append(found / any_s - 1)
            losses_with_line.append(min(found, in_line) / any_s - 1)
    return f"{len(losses):6} {missed:7}  {_summary(losses)}  {_summary(losses_with_line)}"


def _summary(losses: list[float]) -> str:
    return f"mean {sum(losses) / len(losses):6.2%} worst {max(losses):6.1%}"


if __name__ == "__main__":
    given = [int(text) for text in sys.argv[1:]]
    main(*(given + [7, 1][len(given) :]))
