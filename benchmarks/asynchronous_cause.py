"""Why deep asynchronous pipelines learn slowly: the delay itself, not how it is predicted.

On the small Transformer of ``asynchronous_tasks.py``:

- *sharpness*: the largest curvature of the loss (eigenvalue of its Hessian, power iteration, all
  that is trained with) times the learning rate of SGD with momentum, after every epoch. Training
  leaves regions that are sharper than it stands; what it stands with a delay is in
  ``asynchronous_stability.py``.
- *rounds*: synchronous training with batches ``s + 1`` times as large. A stage with ``s`` batches
  in flight gets its gradients in as many rounds of one after the other, if predictions say nothing
  about gradients that are not there yet.
- *predictions*: as far as the delay (``s`` updates), half as far, and as far as momentum goes
  without any further gradient (the sum of its powers), each with a backward that meets the weights
  of the moment, and with one that meets the predicted ones.

    python benchmarks/asynchronous_cause.py --seeds 2
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping

import torch
from asynchronous_learning import fit
from asynchronous_tasks import OPTIMIZERS, TASKS, Data, Task
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_gpp.text_table import text_table
from lightning_gpp.weights.policies import POLICIES, BackwardWeights, Place, Policy

NUM_ITERATIONS, MOMENTUM = 15, 0.9
RATES = {"momentum": 0.01, "adam": 0.0005}
"""The best ones for ``flush``."""


def sharpness(net: nn.Module, data: Data) -> float:
    """The largest curvature of the loss, by power iteration."""
    parameters = list(net.parameters())
    with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
        loss = F.cross_entropy(net(data[0]), data[1])
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    generator, found = torch.Generator().manual_seed(0), 0.0
    vectors = [torch.randn(p.shape, generator=generator) for p in parameters]
    for _ in range(NUM_ITERATIONS):
        norm = torch.stack([vector.square().sum() for vector in vectors]).sum().sqrt()
        vectors = [vector / norm for vector in vectors]
        products = torch.autograd.grad(gradients, parameters, vectors, retain_graph=True)
        found = _dot(products, vectors)
        vectors = list(products)
    return found


def _dot(ones: tuple[Tensor, ...], others: list[Tensor]) -> float:
    return float(sum((one * other).sum() for one, other in zip(ones, others, strict=True)))


def sharpness_rows(task: Task, data: Data) -> list[tuple[str, ...]]:
    """Rate times sharpness after every epoch."""
    rows = []
    for name, depth in (("flush", 1), ("stash", 4), ("pipeoptim", 4), ("pipeoptim", 8)):
        rate, seen = RATES["momentum"], list[float]()

        def watch(net: nn.Module, trained: Data, seen: list[float] = seen) -> None:
            seen.append(sharpness(net, trained))

        fit(task, data, POLICIES[name], OPTIMIZERS["momentum"][0], rate, 0, depth, watch=watch)
        numbers = (f"{rate * each:.2f}" for each in seen)
        rows.append((f"{name}, {depth} stages", " ".join(numbers)))
    return rows


def round_rows(task: Task, data: Data, seeds: int) -> list[tuple[str, ...]]:
    """Accuracy of synchronous training with larger batches, by rate."""
    rows = []
    for optimizer, (make, rates) in list(OPTIMIZERS.items())[:2]:
        for batch in (32, 128, 256):
            ends = [
                100
                * statistics.mean(
                    fit(task, data, POLICIES["flush"], make, lr, seed, 1, batch=batch)[-1]
                    for seed in range(seeds)
                )
                for lr in (*rates, 10 * rates[1])
            ]
            rows.append((optimizer, str(batch), *(f"{end:.1f}" for end in ends)))
    return rows


AHEAD: Mapping[str, Callable[[int], float]] = {
    "s": lambda s: s,
    "s / 2": lambda s: s / 2,
    "without further gradients": lambda s: sum(MOMENTUM**k for k in range(1, s + 1)),
}


def prediction_rows(data: Data, seeds: int) -> list[tuple[str, ...]]:
    """Accuracy with eight stages by how far weights are predicted."""
    rows = []
    for name, further in AHEAD.items():
        for backward in (BackwardWeights.OF_THE_MOMENT, BackwardWeights.OF_FORWARD):

            def forward(place: Place, further: Callable[[int], float] = further) -> float:
                return further(place.difference)

            policy = Policy(name, forward=forward, backward=backward)  # type: ignore[arg-type]
            ends = [
                100
                * statistics.mean(
                    fit(TASKS[task], data, policy, OPTIMIZERS[how][0], RATES[how], seed, 8)[-1]
                    for seed in range(seeds)
                )
                for task, how in (("conv", "momentum"), ("transformer", "adam"))
            ]
            rows.append((name, backward.name.lower(), *(f"{end:.1f}" for end in ends)))
    return rows


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2)
    seeds = parser.parse_args().seeds
    torch.set_num_threads(1)
    task = TASKS["transformer"]
    data = task.read()
    rows = sharpness_rows(task, data)
    print(text_table(("policy", "rate times sharpness after every epoch"), rows, max_width=120))
    print(flush=True)
    rates = ("lower rate", "middle", "upper", "ten times the middle")
    rows = round_rows(task, data, seeds)
    print(text_table(("optimizer", "batch", *rates), rows, max_width=120), flush=True)
    header = ("predicted ahead", "backward meets", "conv, SGD", "transformer, Adam")
    print()
    print(text_table(header, prediction_rows(data, seeds), max_width=120))


if __name__ == "__main__":
    main()
