"""How well asynchronous pipelines learn: validation accuracy for all policies of weights.

Data sets and nets are those of ``asynchronous_tasks.py``. Every net has eight blocks, cut into a
chain of ``--depth`` stages. The stages take turns
in one process, in the order of the windows of ``1f1b-async``, and run with the weights that the
package gives them; that processes train the same to 1e-12 is what ``tests/unit/weights`` and
``tests/strategy/asynchronous`` hold. Epochs end with an empty pipeline.

A row is a policy with an optimizer: mean and standard deviation over the seeds of the validation
accuracy after the last epoch, of the best one, and the epochs until the goal (those of the run and
one where it is never reached). The learning rate of an optimizer is, of a few, the one with which
``flush``, synchronous training, ends best on seeds that are not in the table.

    python benchmarks/asynchronous_learning.py --tasks conv --seeds 3
    LIGHTNING_GPP_DATA=FOLDER python benchmarks/asynchronous_learning.py --depth 8    # all, long
    python benchmarks/asynchronous_learning.py --tasks transformer --depth 8 --policies pipeoptim \
        --pieces 8    # every batch of 32 as eight of 4, whose gradients are accumulated
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from asynchronous_tasks import OPTIMIZERS, TASKS, Data, Task, digits
from measuring import parser
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import Optimizer

from lightning_gpp.common.text_table import text_table
from lightning_gpp.runtime.stage_run import StageCall
from lightning_gpp.strategy.step.async_steps import VersionedStage, WeightVersions
from lightning_gpp.weights.last_steps import LastSteps
from lightning_gpp.weights.policies import POLICIES, Policy
from lightning_gpp.weights.versions import StageWeights

BATCH = 32


@dataclass(slots=True)
class Stage:
    """A stage with the weights that the policy gives it.

    Attributes:
        optimizer: of its parameters.
        last_steps: of that.
        versioned: runs it.
        lead: mini-batches that it is ahead of its backward.
        begun: mini-batches whose forward it has done.
        flights: mini-batch -> what it got and what it gave.
    """

    optimizer: Optimizer
    last_steps: LastSteps
    versioned: VersionedStage
    lead: int
    begun: int = 0
    flights: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def forward(self, number: int, x: Tensor) -> None:
        """The forward of a mini-batch."""
        x = x.detach().requires_grad_()
        (out,) = self.versioned([x], StageCall(number))
        self.flights[number], self.begun = (x, out), number + 1


def pipeline(
    net: Sequence[nn.Module],
    depth: int,
    policy: Policy,
    make: Callable[..., Optimizer],
    lr: float,
    pieces: int = 1,
) -> tuple[list[Stage], WeightVersions]:
    """The stages of a chain; an update takes ``pieces`` mini-batches.

    With 2BW at least as many as it is ahead.
    """
    per_update = max(pieces, depth - 1) if policy.is_one_behind else pieces
    versions = WeightVersions(per_update=per_update)
    found = []
    each = len(net) // depth
    for number in range(depth):
        module = nn.Sequential(*net[number * each : (number + 1) * each])
        own = dict(module.named_parameters())
        optimizer = make(list(own.values()), lr)
        last_steps = LastSteps(optimizer)
        if number == 0:
            last_steps.before_update.append(versions.count)
        weights = StageWeights(policy, own, [last_steps])
        lead = depth - 1 - number

        def run(values: Sequence[Any], call: StageCall, module: nn.Module = module) -> list[Any]:
            if call.weights is None:
                return [module(*values)]
            return [functional_call(module, dict(call.weights), tuple(values))]

        versioned = VersionedStage(run, weights, versions, lead, depth - 1)
        found.append(Stage(optimizer, last_steps, versioned, 0 if policy.drains else lead))
    return found, versions


def train_epoch(
    stages: Sequence[Stage],
    versions: WeightVersions,
    batches: Sequence[Data],
    drains: bool,
    clip: Clip,
) -> None:
    """Trains; the pipeline is empty before and after."""
    for stage in stages:
        stage.begun = 0
    for number, (_, target) in enumerate(batches):
        if drains or not number:
            versions.begin(number)
            for stage in stages:
                stage.last_steps.forget()
        for before, stage in zip([None, *stages], stages, strict=False):
            while stage.begun <= min(number + stage.lead, len(batches) - 1):
                begun = stage.begun
                stage.forward(
                    begun, batches[begun][0] if before is None else before.flights[begun][1]
                )
        x, out = stages[-1].flights.pop(number)
        (F.cross_entropy(out, target) / versions.per_update).backward()
        for stage in reversed(stages[:-1]):
            gradient = x.grad
            x, out = stage.flights.pop(number)
            out.backward(gradient)
        if (number + 1) % versions.per_update == 0 or number + 1 == len(batches):
            clip(stages)
            for stage in reversed(stages):
                stage.optimizer.step()
                stage.optimizer.zero_grad()


@dataclass(frozen=True, slots=True)
class Clip:
    """How gradients are clipped.

    Attributes:
        norm: the largest one; None does not limit it.
        is_over_all: whether it is that of the gradients of all stages together.
    """

    norm: float | None = None
    is_over_all: bool = False

    def __call__(self, stages: Sequence[Stage]) -> None:
        """Clips."""
        own = [[p for g in stage.optimizer.param_groups for p in g["params"]] for stage in stages]
        for parameters in [[*itertools.chain(*own)]] if self.is_over_all else own:
            if self.norm is not None:
                nn.utils.clip_grad_norm_(parameters, self.norm)


NO_CLIP = Clip()


def accuracy(net: nn.Module, data: Data) -> float:
    """Part of the samples that it tells."""
    with torch.no_grad():
        return float((net(data[0]).argmax(1) == data[1]).float().mean())


def fit(
    task: Task,
    data: Data,
    policy: Policy,
    make: Any,
    lr: float,
    seed: int,
    depth: int,
    clip: Clip = NO_CLIP,
    pieces: int = 1,
) -> list[float]:
    """The accuracy after every epoch.

    Args:
        task: what is learned.
        data: from which.
        policy: of weights.
        make: the optimizer.
        lr: its rate.
        seed: of the net, of what is trained with, and of the order of it.
        depth: number of stages.
        clip: of gradients.
        pieces: mini-batches that a batch is cut into.
    """
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    order = torch.randperm(len(data[1]), generator=generator)
    cut = len(order) * 3 // 4
    train, valid = order[:cut], order[cut:]
    net = task.net(data)
    stages, versions = pipeline(net, depth, policy, make, lr, pieces)
    whole = nn.Sequential(*net)
    size = BATCH // versions.per_update
    found = []
    for _ in range(task.epochs):
        shuffled = train[torch.randperm(cut, generator=generator)]
        parts = [part for part in shuffled.split(size) if len(part) == size]
        batches = [(data[0][part], data[1][part]) for part in parts]
        train_epoch(stages, versions, batches, policy.drains, clip)
        found.append(accuracy(whole, (data[0][valid], data[1][valid])))
    for stage in stages:
        stage.last_steps.close()
    return found


# The table ----------------------------------------------------------------------------------


def best_rate(task: Task, data: Data, policy: str, name: str, depth: int) -> float:
    """The learning rate with which training with a policy ends best, on two other seeds."""
    make, rates = OPTIMIZERS[name]
    ends = {
        lr: statistics.mean(
            fit(task, data, POLICIES[policy], make, lr, seed, depth)[-1] for seed in (100, 101)
        )
        for lr in rates
    }
    return max(ends, key=ends.__getitem__)


def row(task: Task, runs: Sequence[Sequence[float]]) -> Iterator[str]:
    """Last and best accuracy in per cent, epochs to the goal: means and deviations."""
    reached = [
        next((i + 1 for i, value in enumerate(run) if value >= task.goal), task.epochs + 1)
        for run in runs
    ]
    for numbers, factor in (
        ([run[-1] for run in runs], 100),
        ([max(run) for run in runs], 100),
        (reached, 1),
    ):
        mean, spread = statistics.mean(numbers), statistics.pstdev(numbers)
        yield f"{factor * mean:.2f} ± {factor * spread:.2f}"


def main() -> None:
    """Prints a table per task and optimizer."""
    asks = parser(__doc__)
    has_data = "LIGHTNING_GPP_DATA" in os.environ
    tasks = [name for name in TASKS if has_data or TASKS[name].read is digits]
    asks.add_argument("--tasks", nargs="+", default=tasks, choices=[*TASKS])
    asks.add_argument("--policies", nargs="+", default=[*POLICIES], choices=[*POLICIES])
    asks.add_argument("--optimizers", nargs="+", default=[*OPTIMIZERS], choices=[*OPTIMIZERS])
    asks.add_argument("--depth", type=int, default=4, choices=[1, 2, 4, 8])
    asks.add_argument("--seeds", type=int, default=5)
    asks.add_argument("--rate", type=float, help="the learning rate; best for flush if not given")
    asks.add_argument("--clip", type=float, help="the largest norm of the gradients of a stage")
    asks.add_argument("--whole-norm", action="store_true", help="of all, as flush does always")
    asks.add_argument("--tuned", action="store_true", help="the best rate for every policy")
    asks.add_argument("--pieces", type=int, default=1, help="mini-batches of a batch of 32")
    options = asks.parse_args()
    torch.set_num_threads(1)
    header = ("policy", "rate", "last accuracy, %", "best accuracy, %", "epochs to goal")
    for name in options.tasks:
        task = TASKS[name]
        data = task.read()
        for optimizer in options.optimizers:
            lr = options.rate
            rows = []
            for policy in options.policies:
                if options.tuned or lr is None:
                    tuned_for = policy if options.tuned else "flush"
                    lr = best_rate(task, data, tuned_for, optimizer, options.depth)
                runs = [
                    fit(
                        task,
                        data,
                        POLICIES[policy],
                        OPTIMIZERS[optimizer][0],
                        lr,
                        seed,
                        options.depth,
                        Clip(options.clip, options.whole_norm or policy == "flush"),
                        1 if policy == "flush" else options.pieces,
                    )
                    for seed in range(options.seeds)
                ]
                rows.append((policy, f"{lr:g}", *row(task, runs)))
            print(
                f"{name}, {optimizer}, {options.depth} stages, {options.pieces} pieces, "
                f"{task.epochs} epochs, goal "
                f"{100 * task.goal:g} %, {options.seeds} seeds, torch {torch.__version__}"
            )
            print(text_table(header, rows, left=("policy",)), flush=True)
            print()


if __name__ == "__main__":
    main()
