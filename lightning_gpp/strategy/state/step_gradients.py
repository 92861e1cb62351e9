"""Gradients averaged over pipelines that train side by side, and those of the user's step.

The step may use a parameter beside the pipelined forward: a penalty on a weight, a tied embedding.
Autograd then adds to its gradient on rank 0. Where other ranks hold a copy of the parameter
(replicas of its stage, other stages that share it), theirs has to be the same before the optimizer
steps (:class:`OwnGradients`).

Where a step goes backward through the pipeline once, the means begin while its last backwards still
run (:mod:`lightning_gpp.runtime.sums.reduction`), of gradients that no other rank of the pipeline
has. What a rank has beside them when the backward is over, such as those that the user's step gives
to parameters itself, is averaged then. Every rank decides by itself whether it begins early, as
pipelines may call the forward differently often: one that has not takes part with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_gpp.runtime.executor import Run
from lightning_gpp.runtime.gradients import GradientStash, add_gradient
from lightning_gpp.runtime.processes.peers import Peers
from lightning_gpp.runtime.sums.reduction import GradientReduction
from lightning_gpp.schedule import Program

_PURPOSE = "averaging gradients over the pipelines"


class AveragedGradients:
    """Averages the gradients of this rank over the pipelines, once per step of the optimizer.

    Args:
        parameters: that this rank and its peers hold, in one order.
        peers: this rank in the other pipelines.
        means: makes the sums that begin in the backwards of a program, or after them for None.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        peers: Peers,
        means: Callable[[Program | None], GradientReduction],
    ) -> None:
        self._parameters, self._peers, self._means = parameters, peers, means
        self._num_runs = 0
        self._expects_one = False
        self._begun: tuple[GradientReduction, GradientStash] | None = None

    def begin(self, run: Run, stash: GradientStash) -> None:
        """Before the backwards of a run: means begin in them if it is likely to be the only one.

        Not beside gradients that are there already, accumulated over batches, say: these would have
        to be averaged for themselves, which takes twice the messages.

        Args:
            run: nothing of whose backwards has run, and after which the optimizer steps.
            stash: gets their gradients.
        """
        self._num_runs += 1
        if self._num_runs > 1 or not self._expects_one:
            return
        means = self._means(run.program)
        if all(parameter.grad is None for parameter in means.parameters):
            run.means, self._begun = means, (means, stash)
            stash.kept = frozenset(map(id, means.parameters))

    def finish(self, *, is_asked_to_end: bool) -> bool:
        """Peers: gradients become their mean over the pipelines.

        A parameter that has none in one pipeline counts there as one of zeros; one that has none
        anywhere still has none.

        Args:
            is_asked_to_end: whether this pipeline is.

        Returns:
            Whether any pipeline is asked to end, which all know after this.

        Raises:
            NotImplementedError: a gradient is sparse, or losses of the pipelines were multiplied
                by different factors after a step that runs for every micro-batch.
        """
        begun, self._begun = self._begun, None
        self._expects_one, self._num_runs = self._num_runs == 1, 0
        held = [parameter for parameter in self._parameters if parameter.requires_grad]
        for parameter in held:
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise NotImplementedError(
                    f"a gradient of shape {tuple(parameter.shape)} is sparse, which is not "
                    "averaged over pipelines; use sparse=False in the embedding, or pipelines=1"
                )
        there = [float(parameter.grad is not None) for parameter in held]
        early = torch.zeros(2, self._peers.num_pipelines, dtype=torch.float64)
        if begun is not None:
            early[:, self._peers.pipeline] = torch.tensor([1.0, begun[1].factor])
        told = [*early.flatten().tolist(), float(is_asked_to_end), *there]
        known = torch.tensor(told, dtype=torch.float64)
        known = self._peers.reduced(known, dist.ReduceOp.SUM, _PURPOSE)
        early = known[: early.numel()].view_as(early)
        ends, *shares = known[early.numel() :].tolist()
        late = [
            torch.zeros_like(parameter) if share and parameter.grad is None else parameter.grad
            for parameter, share in zip(held, shares, strict=True)
        ]
        for parameter in held:
            parameter.grad = None
        means = None
        if early[0].any():  # before all others, as where they began in the backward
            means = self._means(None) if begun is None else begun[0]
            means.start_all()
        self._peers.mean_([gradient for gradient in late if gradient is not None], _PURPOSE)
        if means is not None:
            means.finish(None, self._peers.timeout_s, _PURPOSE)
            factor = _only_factor(early)
            for parameter in means.parameters if factor != 1 else ():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        for parameter, gradient in zip(held, late, strict=True):
            if gradient is not None:
                add_gradient(parameter, gradient)
        return bool(ends)


def _only_factor(early: Tensor) -> float:
    """By what all pipelines that began early multiply the gradients of their step.

    Raises:
        NotImplementedError: they differ.
    """
    factors: set[float] = {factor for is_begun, factor in early.T.tolist() if is_begun}
    if len(factors) > 1:
        raise NotImplementedError(
            "pipelines went backward from losses that were multiplied by different factors after "
            "the training step; with the schedule '1f1b' they are averaged by then. Multiply in "
            "the training step, or use schedule='gpipe'"
        )
    return factors.pop()


class OwnGradients:
    """Notices on rank 0 what the step adds to the gradients of parameters on several ranks.

    Args:
        shared: the parameters that this rank and others hold, by name.
    """

    def __init__(self, shared: Mapping[str, Parameter]) -> None:
        self._shared = shared
        self._touched: set[str] = set()
        self.note()

    def note(self) -> None:
        """What the gradients are now, they are on all ranks; but for those seen to differ."""
        self._known = self._now()

    def look(self) -> None:
        """Sees which gradients have changed since they were noted; a cleared one is so on all."""
        for name, now in self._now().items():
            known = self._known[name]
            if now is None:
                self._touched.discard(name)
            elif known is None or now[0] is not known[0] or now[1] != known[1]:
                self._touched.add(name)

    def _now(self) -> dict[str, tuple[ref[Tensor], int] | None]:
        """The gradients, which this does not keep, and how often they have changed."""
        return {
            name: None if p.grad is None else (ref(p.grad), p.grad._version)
            for name, p in self._shared.items()
        }

    def take(self) -> dict[str, Tensor]:
        """The gradients that others have to take over."""
        self.look()
        touched, self._touched = self._touched, set()
        self.note()
        found = {name: self._shared[name].grad for name in sorted(touched)}
        return {name: gradient for name, gradient in found.items() if gradient is not None}
