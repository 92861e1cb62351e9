"""How far the gradients of full-graph training with histories are from exact ones, and why.

The networks, graphs and settings of ``gnnpipe_learning.py``. Weights are those after some epochs of
exact training and stay while gradients are measured. What is in the histories is exact, or old, or
zeros; so the error of the gradients' own technique is seen by itself, and that of old values. The
first of the techniques is measured with fewer layers too.

    LIGHTNING_GPP_DATA=FOLDER python benchmarks/gnnpipe_gradients.py gradients.json --data Cora
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gnnpipe_learning import DEPTH, MODELS, SETTINGS, Run, Settings, Variant, data_sets, keep

from lightning_gpp.gnn import Techniques
from lightning_gpp.gnn.history import REFRESH_EVERY
from lightning_gpp.recipes.gnn import FullGraphData
from lightning_gpp.text_table import text_table


@dataclass(frozen=True)
class Case:
    """What gradients are measured with.

    Attributes:
        techniques: how histories are used.
        age: epochs of training that the values in the histories are older than the weights; None
            if they are zeros.
    """

    techniques: Techniques
    age: int | None = 0


HELD = 10**6
"""No refresh while gradients are measured."""

CASES = {
    "all techniques, values of these weights": Case(Techniques(True, HELD)),
    "the same in a fixed order": Case(Techniques(False, HELD)),
    "the same, historical gradients": Case(Techniques(True, HELD, True)),
    "all techniques, values of the epoch before": Case(Techniques(True, HELD), 1),
    "all techniques, values 22 epochs old": Case(Techniques(True, HELD), REFRESH_EVERY - 1),
    "all techniques, values are zeros": Case(Techniques(True, HELD), None),
}
NUM_PAIRS, NUM_SKIPPED = 256, 2
"""Pairs of epochs that are measured with one layer (fewer with more), and those before them, in
which gradients enter the histories."""


def gradient_errors(
    data: FullGraphData, layer: str, settings: Settings, case: Case, epochs: int, depth: int
) -> dict[str, float]:
    """How far gradients with histories are from exact ones.

    The weights are those after ``epochs`` of exact training and stay. Dropout is off. Orders come
    in pairs, one and its reverse, so that what is unbiased along one edge has no error in the mean.

    Returns:
        ``cosine`` of the mean of the gradients of some epochs with the exact one, ``bias`` of that
        mean and ``spread`` of a single one about it, as shares of the exact gradient's norm.
    """
    run = Run(data, layer, Variant(case.techniques), seed=0, dropout=0.0, depth=depth)
    optimizer = run.optimizer(settings)
    run.net.train()
    for epoch in range(epochs + 1):
        if case.age is not None and epoch == epochs - case.age:
            with torch.no_grad():
                run.scores(exact=True, fills=True)
        if epoch < epochs:
            run.gradient(exact=True)
            optimizer.step()
    exact = run.gradient(exact=True).clone()
    found = []
    for _ in range(NUM_SKIPPED + NUM_PAIRS // depth):
        order = run.order()
        for one in (order, order[::-1] if case.techniques.shuffle else order):
            run.history.begin_epoch(one)
            found.append(run.gradient(exact=False))
    found = found[2 * NUM_SKIPPED :]
    mean, norm = torch.stack(found).mean(0), float(exact.norm())
    spread = statistics.mean(float((one - mean).norm()) for one in found)
    return {
        "cosine": float(F.cosine_similarity(mean, exact, dim=0)),
        "bias": float((mean - exact).norm()) / norm,
        "spread": spread / norm,
    }


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("results", type=Path, help="JSON file")
    parser.add_argument("--root", default=os.environ.get("LIGHTNING_GPP_DATA", "data"))
    parser.add_argument("--data", nargs="+", default=["blocks", "Cora"])
    parser.add_argument("--models", nargs="+", default=["GCNII"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    sets = data_sets(os.path.join(options.root, "planetoid"))
    results: list[dict[str, Any]] = []
    for name, model in itertools.product(options.data, options.models):
        layer, cases = MODELS[model], list(itertools.product(CASES, (30, 100), (DEPTH,)))
        cases += [(next(iter(CASES)), 30, depth) for depth in (1, 2, 4, 8)]
        for case, epochs, depth in cases:
            errors = gradient_errors(
                sets[name], layer, SETTINGS[name, layer], CASES[case], epochs, depth
            )
            row = {"data": name, "model": model, "layers": depth, "epochs": epochs, "case": case}
            results.append({**row, **errors})
            keep(options.results, results)
    rows = [[f"{v:.3f}" if isinstance(v, float) else str(v) for v in r.values()] for r in results]
    print(text_table(list(results[0]), rows, left=["case"]))


if __name__ == "__main__":
    main()
