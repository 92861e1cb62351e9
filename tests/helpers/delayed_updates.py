"""Training with delayed updates in one thread, written from the definitions; the tests' reference.

Stage ``k`` of a graph computes ``tanh(sum of its inputs @ W_k)``. It is ``lead_k`` mini-batches
ahead of its backward: the forward of mini-batch ``n`` meets ``u = max(0, n - lead_k)`` updates, its
backward ``n``, or as many of them as there were where an update takes several mini-batches. What
the two passes run with is the policy's definition, by hand and in plain loops:

- stash (PipeDream, SOSP 2019): both with ``W_k[u]``;
- pipeoptim (arXiv 2312.00839, section 3): forward ``W_k[u] + (n - u) (W_k[u] - W_k[u - 1])``,
  backward ``W_k[n]``;
- spectrain (arXiv 1809.02839): forward ``n - u + k // 2`` ahead, backward ``k // 2``;
- xpipe (arXiv 1911.04610): forward ``n - u + k - k // 2`` ahead, backward ``k // 2``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_gpp.graph import FEED, StageGraph


@dataclass
class DelayedStage:
    """One stage: all versions of its weights, and what every update subtracted."""

    versions: list[Tensor]
    optimizer: Optimizer
    weight: Tensor
    steps: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, weight: Tensor, make: Callable[[list[Tensor]], Optimizer]) -> DelayedStage:
        own = weight.detach().clone().requires_grad_()
        return cls([own.detach().clone()], make([own]), own)

    def update(self, gradient: Tensor) -> None:
        self.weight.grad = gradient
        self.optimizer.step()
        new = self.weight.detach().clone()
        self.steps.append(self.versions[-1] - new)
        self.versions.append(new)

    def predicted(self, version: int, ahead: int) -> Tensor:
        if version == 0 or not ahead:
            return self.versions[version]
        return self.versions[version] - ahead * self.steps[version - 1]


def _passes(policy: str, difference: int, rank: int) -> tuple[int, int | None]:
    """How far ahead the weights of the forward are, and of the backward (None: the forward's)."""
    half = rank // 2
    found: Mapping[str, tuple[int, int | None]] = {
        "stash": (0, None),
        "none": (0, 0),
        "pipeoptim": (difference, 0),
        "pipeoptim-release": (difference + 1, 0),
        "pipeoptim-at-predicted": (difference, None),
        "spectrain": (difference + half, half),
        "xpipe": (difference + rank - half, half),
    }
    return found[policy]


def train_delayed(
    stages: StageGraph,
    weights: Sequence[Tensor],
    batches: Sequence[tuple[Tensor, Tensor]],
    policy: str,
    make: Callable[[list[Tensor]], Optimizer],
    runs: Sequence[int] = (),
    forgets: bool = False,
    clip: float | None = None,
    per_update: Sequence[int] = (1,),
) -> tuple[list[float], list[Tensor]]:
    """The loss of every mini-batch, and the trained weights.

    Args:
        stages: the stage graph; the last stage's value is compared with the target.
        weights: of every stage.
        batches: inputs and targets.
        policy: its name; ``flush`` drains after every mini-batch.
        make: the optimizer of one stage's parameters.
        runs: numbers of mini-batches between which the pipeline drains; all in one if not given.
        forgets: whether what the last update did is not known any more after that.
        clip: largest norm of the gradient of a stage; of all of them where the pipeline drains.
        per_update: of how many mini-batches an update takes the sum of the gradients, divided by
            it, in each run (of which the last number is for all that follow); the last update of a
            run takes those that are left.
    """
    found = [DelayedStage.of(weight, make) for weight in weights]
    leads = [stages.depths[stage] - 1 for stage in range(stages.num_stages)]
    losses, starts = [], [0, *itertools.accumulate(runs or [len(batches)])]
    updates = [0]  # before every mini-batch
    for n, (x, target) in enumerate(batches):
        values, inputs, of_backward = {FEED: x}, {}, {}
        begin = max(start for start in starts if start <= n)
        each = per_update[min(starts.index(begin), len(per_update) - 1)]
        for k, stage in enumerate(found):
            lead = 0 if policy == "flush" else leads[k]
            now, rank = updates[n], max(leads) - leads[k]
            u = updates[max(begin, n - lead)]
            ahead, back = (0, None) if policy == "flush" else _passes(policy, now - u, rank)
            if forgets and u == updates[begin]:
                ahead = 0
            forward = stage.predicted(u, ahead)
            of_backward[k] = forward if back is None else stage.predicted(now, back)
            sources = [edge.source for edge in stages.edges if edge.target == k]
            inputs[k] = sum(values[source] for source in sources)
            values[k] = torch.tanh(inputs[k] @ forward)
        last = stages.num_stages - 1
        losses.append((values[last] - target).square().mean().item())
        gradients = {k: torch.zeros_like(values[k]) for k in range(stages.num_stages)}
        gradients[last] = 2 * (values[last] - target) / target.numel()
        for k in reversed(range(stages.num_stages)):
            inner = gradients[k] * (1 - values[k].square())
            for edge in stages.edges:
                if edge.target == k and edge.source != FEED:
                    gradients[edge.source] = gradients[edge.source] + inner @ of_backward[k].T
            found[k].gradients.append(inputs[k].T @ inner / each)
        is_due = (n + 1 - begin) % each == 0 or n + 1 in starts
        updates.append(updates[n] + is_due)
        if is_due:
            _update(found, clip, is_over_all=policy == "flush")
    return losses, [stage.versions[-1] for stage in found]


def _update(stages: Sequence[DelayedStage], clip: float | None, *, is_over_all: bool) -> None:
    """Every stage's update by the sum of its gradients, clipped by its norm or by that of all."""
    sums = [torch.stack(stage.gradients).sum(0) for stage in stages]
    for stage, gradient in zip(stages, sums, strict=True):
        factor = 1.0
        if clip is not None:
            norm = sum(each.square().sum() for each in (sums if is_over_all else [gradient])) ** 0.5
            factor = min(1.0, clip / (norm + 1e-6))
        stage.update(gradient * factor)
        stage.gradients.clear()


def train_one_behind(
    stages: StageGraph,
    weights: Sequence[Tensor],
    batches: Sequence[tuple[Tensor, Tensor]],
    per_update: int,
    make: Callable[[list[Tensor]], Optimizer],
) -> tuple[list[float], list[Tensor]]:
    """PipeDream-2BW (arXiv 2006.09503): ``W(t+1) = W(t) - f(W(t-1))``, all stages alike.

    Args:
        stages: the stage graph.
        weights: of every stage.
        batches: inputs and targets.
        per_update: of how many of them an update takes the sum of the gradients, divided by it;
            the last one takes those that are left.
        make: the optimizer of one stage's parameters.
    """
    own = [weight.detach().clone().requires_grad_() for weight in weights]
    versions = [[weight.detach().clone() for weight in own]]
    optimizers = [make([weight]) for weight in own]
    losses = []
    for first in range(0, len(batches), per_update):
        used = [weight.clone().requires_grad_() for weight in versions[-2:][0]]
        for x, target in batches[first : first + per_update]:
            values = {FEED: x}
            for k, weight in enumerate(used):
                sources = [edge.source for edge in stages.edges if edge.target == k]
                values[k] = torch.tanh(torch.stack([values[s] for s in sources]).sum(0) @ weight)
            loss = (values[stages.num_stages - 1] - target).square().mean()
            losses.append(loss.item())
            (loss / per_update).backward()
        for weight, with_gradient, optimizer in zip(own, used, optimizers, strict=True):
            weight.grad = with_gradient.grad
            optimizer.step()
        versions.append([weight.detach().clone() for weight in own])
    return losses, versions[-1]
