"""Synchronous SGD on equal copies of a network, as a program: the special case of one stage.

Every device reads its own mini-batch, computes the whole network, and sums its gradients with the
others. The variants are those of the DAG model of S-SGD (Shi et al., arXiv 1805.03812) and its
successor MG-WFBP (Shi et al., INFOCOM 2019):

========== =========================== ====================================================
variant    the next input is read      gradients are summed
========== =========================== ====================================================
naive      after the step              layer by layer, after the backward
pre-fetch  while a step computes       layer by layer, after the backward
wait-free  while a step computes       layer by layer, beside the backward
merged     while a step computes       in groups of layers that make no sum later
========== =========================== ====================================================

The program goes through the one engine; the paper's closed formulas are what its result must equal
(tests/property/test_ssgd.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from lightning_gpp.cluster import Cluster, all_reduce_s
from lightning_gpp.planner import PlanRequest
from lightning_gpp.planner.step_time.gradients import GradientPiece, Gradients, SumSeconds
from lightning_gpp.schedule import GPIPE, Action, Kind, Program
from lightning_gpp.schedule.program_parts import ReduceGroup, Replica
from lightning_gpp.simulate.program_costs import Bucket, ProgramCosts, StageCosts, StepCosts
from lightning_gpp.simulate.simulation import simulate


def at_end(gradients: Gradients, sum_s: SumSeconds) -> list[GradientPiece]:
    """Every layer by itself, but not before the whole backward is done."""
    return [GradientPiece(piece.size_bytes, gradients.backward_s) for piece in gradients.pieces]


def merged(gradients: Gradients, sum_s: SumSeconds) -> list[GradientPiece]:
    """MG-WFBP: a layer joins the sum before it where that makes no sum end later.

    A sum of ``n`` bytes takes about ``a + b n`` seconds. A layer joins if its gradients come before
    that sum would end, and either that sum has not begun by then, or has waited for less than what
    a sum less saves (``a``).
    """
    found: list[GradientPiece] = []
    end_s = 0.0
    for piece in gradients.pieces:
        if found:
            last = found[-1]
            start_s = max(end_s, last.ready_s)
            own_s, other_s = sum_s(last.size_bytes), sum_s(piece.size_bytes)
            saved_s = own_s + other_s - sum_s(last.size_bytes + piece.size_bytes)
            if piece.ready_s < start_s + own_s and piece.ready_s - start_s < saved_s:
                found[-1] = last.with_next(piece)
                continue
            end_s = start_s + own_s
        found.append(piece)
    return found


VARIANTS: Mapping[str, Callable[[Gradients, SumSeconds], list[GradientPiece]]] = {
    "naive": at_end,
    "pre-fetch": at_end,
    "wait-free": lambda gradients, sum_s: list(gradients.pieces),
    "merged": merged,
}
"""Variant -> how it sums; each is at least as good as the one before it."""


class Layer(NamedTuple):
    """A layer of a network, or an operator.

    Attributes:
        forward_s: seconds of its forward for a device's mini-batch.
        backward_s: seconds of its backward.
        gradient_bytes: bytes of the gradients of its trained parameters.
    """

    forward_s: float
    backward_s: float
    gradient_bytes: float = 0.0


def model_layers(request: PlanRequest, samples: float) -> list[Layer]:
    """The operators of a model as layers, in the order of its forward.

    A parameter that several operators read belongs to the first of them, whose backward is last.
    On devices of several kinds, every layer takes what it takes on the slowest.
    """
    kinds = [request.profile(samples, kind).operators for kind in request.cluster.kinds]
    owners: dict[str, str] = {}
    for operator in request.graph:
        for name in operator.parameters:
            owners.setdefault(name, operator.name)
    size_bytes = dict.fromkeys(kinds[0], 0.0)
    for name, owner in owners.items():
        parameter = request.graph.parameter[name]
        size_bytes[owner] += parameter.size_bytes if parameter.requires_grad else 0
    return [
        Layer(
            max(costs[operator.name].forward_s for costs in kinds),
            max(costs[operator.name].backward_s for costs in kinds),
            size_bytes[operator.name],
        )
        for operator in request.graph
    ]


@dataclass(frozen=True)
class Ssgd:
    """S-SGD of a network on a cluster, all devices alike.

    Attributes:
        layers: the network, in the order of its forward.
        cluster: the devices.
        variant: name in :data:`VARIANTS`.
        step: reading and copying a device's mini-batch (``data_s``) and the optimizer
            (``optimizer_s``). Devices read side by side.
    """

    layers: Sequence[Layer]
    cluster: Cluster
    variant: str = "wait-free"
    step: StepCosts = field(default_factory=StepCosts)

    def program(self) -> Program:
        """A forward, a backward, the sums and the update on every device.

        >>> from lightning_gpp.cluster import uniform_cluster
        >>> print(Ssgd([Layer(1.0, 2.0)], uniform_cluster(2)).program())
        device 0: 0F0 0B0 0R0 0S0
        device 1: 1F0 1B0 1R0 1S0
        """
        count = self.cluster.num_devices
        devices = tuple(range(count))
        groups = (ReduceGroup(("gradients",), devices, stage=0),) if count > 1 else ()
        kinds = (Kind.FORWARD, Kind.BACKWARD, *(Kind.REDUCE for _ in groups), Kind.STEP)
        return Program(
            schedule=GPIPE,
            num_microbatches=count,
            devices=devices,
            multiples=(1,) * count,
            edges=(),
            actions=tuple(tuple(Action(device, kind, 0) for kind in kinds) for device in devices),
            reduce_groups=groups,
            replicas=tuple(Replica(0, index, count) for index in devices),
        )

    def costs(self) -> ProgramCosts:
        """Costs of the program."""
        backwards = self.layers[::-1]
        ends_s = list(accumulate(layer.backward_s for layer in backwards))
        pieces = [
            GradientPiece(layer.gradient_bytes, end_s)
            for layer, end_s in zip(backwards, ends_s)
            if layer.gradient_bytes and self.cluster.num_devices > 1
        ]
        gradients = Gradients(pieces, ends_s[-1])
        devices = range(self.cluster.num_devices)
        sum_s = partial(all_reduce_s, self.cluster, devices)
        found = VARIANTS[self.variant](gradients, sum_s)
        forward_s = sum(layer.forward_s for layer in self.layers)
        return ProgramCosts(
            self.cluster,
            (StageCosts(forward_s, ends_s[-1]),) * len(devices),
            buckets=tuple(Bucket(0, each.size_bytes, gradients.part(each)) for each in found),
            step=self.step,
        )

    @property
    def step_s(self) -> float:
        """Seconds of a step; where the input is read ahead none is shorter than reading it."""
        if self.variant == "naive":
            return simulate(self.program(), self.costs()).step_s
        costs = replace(self.costs(), step=replace(self.step, data_s=0.0))
        return max(self.step.data_s, simulate(self.program(), costs).step_s)
