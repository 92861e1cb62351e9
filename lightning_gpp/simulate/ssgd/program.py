"""Synchronous SGD on equal copies of a network, as a program: the special case of one stage.

Every device reads its own mini-batch, computes the whole network, and sums its gradients with the
others. The variants are those of the DAG model of S-SGD (Shi et al., arXiv 1805.03812) and its
successor MG-WFBP (INFOCOM 2019):

========== =========================== ====================================================
variant    the next input is read      gradients are summed
========== =========================== ====================================================
naive      after the step              layer by layer, after the backward
pre-fetch  while a step computes       layer by layer, after the backward
wait-free  while a step computes       layer by layer, beside the backward
merged     while a step computes       in groups of layers that make no sum later
========== =========================== ====================================================

The program goes through the one engine of :mod:`lightning_gpp.simulate.engine`; the paper's closed
formulas are what its result must equal (tests/property/test_ssgd.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from lightning_gpp.cluster import AllReduce, Cluster, all_reduce_s
from lightning_gpp.planner.step_time.gradients import GradientPiece
from lightning_gpp.schedule import GPIPE, Action, Kind, Program, ReduceGroup, Replica
from lightning_gpp.simulate.engine.run import simulate
from lightning_gpp.simulate.program_costs import Bucket, ProgramCosts, StageCosts, StepCosts
from lightning_gpp.simulate.simulation import Simulation
from lightning_gpp.simulate.ssgd.gradient_merging import merged_by
from lightning_gpp.simulate.ssgd.layers import Layer, layer_gradients
from lightning_gpp.simulate.what_if.changes import WhatIf, has_input
from lightning_gpp.simulate.what_if.grown_cluster import twice


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to run S-SGD.

    Attributes:
        merging: how gradients are summed, a name in
            :data:`~lightning_gpp.simulate.ssgd.gradient_merging.MERGING`.
        prefetches: whether the next mini-batch is read and copied while a step computes.
    """

    merging: str
    prefetches: bool = True


VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "naive": Variant("at_end", prefetches=False),
        "pre-fetch": Variant("at_end"),
        "wait-free": Variant("wait_free"),
        "merged": Variant("merged"),
    }
)
"""Name -> variant; each is at least as good as the one before it."""


def ssgd_program(num_devices: int) -> Program:
    """One step of S-SGD: a forward, a backward, the sums and the update on every device.

    >>> print(ssgd_program(2))
    device 0: 0F0 0B0 0R0 0S0
    device 1: 1F0 1B0 1R0 1S0
    """
    devices = tuple(range(num_devices))
    groups = (ReduceGroup(("gradients",), devices, stage=0),) if num_devices > 1 else ()
    kinds = (Kind.FORWARD, Kind.BACKWARD, *(Kind.REDUCE for _ in groups), Kind.STEP)
    return Program(
        schedule=GPIPE,
        num_microbatches=num_devices,
        devices=devices,
        multiples=(1,) * num_devices,
        edges=(),
        actions=tuple(tuple(Action(device, kind, 0) for kind in kinds) for device in devices),
        reduce_groups=groups,
        replicas=tuple(Replica(0, index, num_devices) for index in devices),
    )


STEPS = 3
"""Steps in a row that show what pre-fetching gives; the last of them is the steady state."""


@dataclass(frozen=True)
class Ssgd:
    """S-SGD of a network on a cluster, all devices alike.

    Attributes:
        layers: the network, in the order of its forward.
        cluster: the devices.
        variant: name in :data:`VARIANTS`.
        step: reading a device's mini-batch (``data_s``), copying it (``input_bytes`` over
            ``host_link``) and the optimizer (``optimizer_s``). Devices read side by side, which
            shows in the tasks of one of them.
        all_reduce: algorithm of the sums.
        samples_per_device: samples of a device's mini-batch.

    Raises:
        ValueError: there is no layer, or no variant of this name.
    """

    layers: Sequence[Layer]
    cluster: Cluster
    variant: str = "wait-free"
    step: StepCosts = field(default_factory=StepCosts)
    all_reduce: AllReduce = "ring"
    samples_per_device: float = 1.0

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("S-SGD needs at least one layer")
        if self.variant not in VARIANTS:
            known = ", ".join(VARIANTS)
            raise ValueError(f"unknown variant {self.variant!r} of S-SGD; known ones: {known}")

    def program(self) -> Program:
        """What every device does in a step."""
        return ssgd_program(self.cluster.num_devices)

    def costs(self) -> ProgramCosts:
        """What it costs."""
        forward_s = sum(layer.forward_s for layer in self.layers)
        backward_s = sum(layer.backward_s for layer in self.layers)
        stages = (StageCosts(forward_s, backward_s),) * self.cluster.num_devices
        return ProgramCosts(
            self.cluster,
            stages,
            buckets=tuple(_bucket(piece, backward_s) for piece in self.sums()),
            step=self.step,
            all_reduce=self.all_reduce,
        )

    def sums(self) -> list[GradientPiece]:
        """The gradients that are summed together, in the order of the sums."""
        if self.cluster.num_devices == 1:
            return []
        gradients = layer_gradients(self.layers)
        return merged_by(VARIANTS[self.variant].merging, gradients, self.sum_s)

    def sum_s(self, size_bytes: float) -> float:
        """Seconds of a sum over all devices."""
        devices = range(self.cluster.num_devices)
        return all_reduce_s(self.cluster, devices, size_bytes, self.all_reduce)

    def simulate(self) -> Simulation:
        """Some steps in a row; ``step_s`` is of the last one."""
        prefetch = VARIANTS[self.variant].prefetches and self.has_input
        num_steps = STEPS if prefetch else 1
        return simulate(self.program(), self.costs(), num_steps=num_steps, prefetch=prefetch)

    # What could be changed ---------------------------------------------------------------------

    @property
    def samples(self) -> float:
        """Samples of a step, all devices together."""
        return self.samples_per_device * self.cluster.num_devices

    @property
    def has_input(self) -> bool:
        """Whether reading and copying the input takes time."""
        return has_input(self.step)

    def changed(self, what_if: WhatIf) -> Ssgd:
        """The same with other links, devices, bytes or input.

        All devices go at the pace of the slowest.

        Raises:
            ValueError: there is no such device or layer.
        """
        what_if.check_names(self.cluster.num_devices, [layer.name for layer in self.layers])
        pace = min(map(what_if.speed, range(self.cluster.num_devices)))
        layers = [
            replace(
                layer,
                forward_s=layer.forward_s * what_if.operators.get(layer.name, 1.0) / pace,
                backward_s=layer.backward_s * what_if.operators.get(layer.name, 1.0) / pace,
                gradient_bytes=layer.gradient_bytes * what_if.bytes,
            )
            for layer in self.layers
        ]
        return replace(
            self,
            layers=layers,
            cluster=what_if.links(self.cluster),
            step=what_if.step(self.step),
        )

    def better_overlap(self) -> Mapping[str, Ssgd]:
        """The better variants, as far as they differ."""
        names = list(VARIANTS)
        hidden = VARIANTS[self.variant].merging
        return {
            f"overlap: {name}": replace(self, variant=name)
            for name in names[names.index(self.variant) + 1 :]
            if self.has_input or VARIANTS[name].merging != hidden
        }

    def twice_the_devices(self) -> Ssgd:
        """On twice the devices."""
        devices = range(2 * self.cluster.num_devices)
        step = self.step
        if step.optimizer_s:
            step = replace(step, optimizer_s=dict.fromkeys(devices, max(step.optimizer_s.values())))
        return replace(self, cluster=twice(self.cluster), step=step)


def _bucket(piece: GradientPiece, backward_s: float) -> Bucket:
    fraction = min(1.0, piece.ready_s / backward_s) if backward_s else 1.0
    return Bucket(0, piece.size_bytes, fraction)
