"""A published workload: a model as data, its costs, and its mini-batch size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightning_gpp.cluster import Cluster
from lightning_gpp.common.checks import check_whole
from lightning_gpp.cost import Costs, OpWork, Profile, powers_of_two, roofline_costs
from lightning_gpp.graph import ModelGraph


@dataclass(frozen=True)
class Workload:
    """A model graph with its costs.

    Attributes:
        name: short, for tables.
        graph: the model.
        costs: what its operators cost where somebody measured it; otherwise what they do (operator
            name -> work), from which costs are estimated for any kind of device.
        samples_per_device: samples of a mini-batch for every device; mini-batches grow with the
            number of devices.
        source: where it comes from.

    Raises:
        ValueError: a device has no sample.
    """

    name: str
    graph: ModelGraph
    costs: Costs | Mapping[str, OpWork]
    samples_per_device: int
    source: str

    def __post_init__(self) -> None:
        check_whole("samples_per_device", self.samples_per_device)

    def minibatch_size(self, num_devices: int) -> int:
        """Samples of one optimizer step on so many devices."""
        return self.samples_per_device * num_devices

    def costs_for(self, cluster: Cluster, minibatch_size: int | None = None) -> Costs:
        """Costs of the operators on the devices of a cluster.

        Args:
            cluster: whose devices.
            minibatch_size: estimates are made for the powers of two up to this many samples; those
                of :meth:`minibatch_size` if not given.

        Raises:
            ValueError: nothing is known of a kind of its devices.
        """
        if isinstance(self.costs, Costs):
            for kind in cluster.kinds:
                self.costs.kind_for(kind)
            return self.costs
        sizes = powers_of_two(minibatch_size or self.minibatch_size(cluster.num_devices))
        profiles: list[Profile] = []
        for device_kind in map(cluster.device_kind, cluster.kinds):
            works = {
                name: replace(work, dtype=_dtype(work, device_kind.peak_flops_per_s))
                for name, work in self.costs.items()
            }
            profiles += roofline_costs(works, [device_kind], sizes).profiles
        return Costs(tuple(profiles))


def _dtype(work: OpWork, known: Mapping[str, float]) -> str:
    """Tensor cores where there are any, and otherwise the plain speed of float32."""
    return work.dtype if work.dtype in known else "float32"
