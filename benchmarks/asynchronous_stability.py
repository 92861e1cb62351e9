"""The largest learning rate that a delay leaves: SGD with momentum on a parabola.

Where a loss is ``a / 2 * W ** 2``, training is linear in the last weights and momenta, so it goes
to zero where the largest eigenvalue of one update is below 1. Every gradient is that at weights of
``delay`` updates ago, predicted ``ahead`` updates by their momentum::

    g = a * (W[t - delay] - ahead * lr * v[t - delay]),   v <- u * v + g,   W <- W - lr * v

Rows are delays; the numbers are the largest ``lr * a`` for which all smaller ones train, by how far
weights are predicted: not at all (``stash``), as far as the delay (``pipeoptim``), less and more.
``compensated`` predicts nothing and gives the newest gradient the weight that it would have had by
now (spike compensation of Kosson et al., "Pipelined backpropagation at scale", MLSys 2021).

    python benchmarks/asynchronous_stability.py
    python benchmarks/asynchronous_stability.py --momentum 0.5
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor

from lightning_gpp.text_table import text_table

RATES = torch.logspace(-3.5, math.log10(4), 600, dtype=torch.float64).tolist()
PARTS = (0.0, 0.5, 1.0, 1.5, 2.0)


def update(rate: float, delay: int, ahead: float, momentum: float, *, compensates: bool) -> Tensor:
    """What an update makes of the last weights, newest first, and the last momenta times lr."""
    count = delay + 1
    matrix = torch.zeros(2 * count, 2 * count, dtype=torch.float64)
    for row in range(1, count):  # they grow older
        matrix[row, row - 1] = matrix[count + row, count + row - 1] = 1.0
    gradient = torch.zeros(2 * count, dtype=torch.float64)
    gradient[delay], gradient[count + delay] = rate, -rate * ahead
    matrix[count] = gradient
    matrix[count, count] += momentum
    now, at_once = 1.0, 0.0
    if compensates:
        now, at_once = momentum**delay, (1 - momentum**delay) / (1 - momentum)
    matrix[0] = -now * matrix[count] - at_once * gradient
    matrix[0, 0] += 1.0
    return matrix


def largest_rate(delay: int, ahead: float, momentum: float, *, compensates: bool = False) -> float:
    """The largest rate, times the curvature, up to which every one trains."""
    for rate, following in zip(RATES, RATES[1:], strict=False):
        matrix = update(following, delay, ahead, momentum, compensates=compensates)
        if torch.linalg.eigvals(matrix).abs().max() > 1 + 1e-9:
            return rate
    return math.inf


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--momentum", type=float, default=0.9)
    momentum = parser.parse_args().momentum
    rows = []
    for delay in (0, 1, 3, 7):
        found = [largest_rate(delay, part * delay, momentum) for part in PARTS]
        found.append(largest_rate(delay, 0, momentum, compensates=True))
        rows.append([str(delay), *(f"{rate:.3f}" for rate in found)])
    header = ("delay", *(f"{part:g} delays ahead" for part in PARTS), "compensated")
    print(text_table(header, rows, max_width=120))


if __name__ == "__main__":
    main()
