"""What if devices, links or operators were faster or slower: changes of a question to a planner.

A change is a factor, so that changes can be combined and swept.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace

from lightning_gpp.cluster import Cluster, HostLink, Link
from lightning_gpp.common.checks import LARGEST
from lightning_gpp.cost import Costs, OpProfile, Profile
from lightning_gpp.planner import PlanRequest
from lightning_gpp.simulate.program_costs import MessageBytes, ProgramCosts, StepCosts


@dataclass(frozen=True)
class WhatIf:
    """Factors; 1 changes nothing.

    Attributes:
        compute: of the speed of all devices (2: twice as fast).
        device: device -> of its speed.
        operators: operator -> of the seconds that it takes (0.5: half of them).
        bandwidth: of the bandwidth of all links.
        latency: of the latency of all links.
        bytes: of the bytes of messages and of gradients that are summed.
        input: of the speed at which mini-batches are read and copied to a device.

    Raises:
        ValueError: a factor makes no sense.
    """

    compute: float = 1.0
    device: Mapping[int, float] = field(default_factory=dict)
    operators: Mapping[str, float] = field(default_factory=dict)
    bandwidth: float = 1.0
    latency: float = 1.0
    bytes: float = 1.0
    input: float = 1.0

    def __post_init__(self) -> None:
        for name, factor in self.factors().items():
            may_be_zero = name in ("latency", "bytes") or name.startswith("operators.")
            is_number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
            if not is_number or not 0 <= factor < math.inf or (factor == 0 and not may_be_zero):
                raise ValueError(
                    f"what_if.{name} is a factor {'of at least' if may_be_zero else 'above'} 0 "
                    f"(1 changes nothing), got {factor!r}"
                )

    def factors(self) -> dict[str, float]:
        """Every factor by its name (``"compute"``, ``"device.3"``)."""
        found: dict[str, float] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Mapping):
                found |= {f"{item.name}.{key}": factor for key, factor in value.items()}
            else:
                found[item.name] = value
        return found

    def describe(self) -> str:
        """What it changes.

        >>> WhatIf(compute=2, device={3: 0.5}).describe()
        'compute x2, device.3 x0.5'
        """
        changed = (f"{name} x{f:g}" for name, f in self.factors().items() if f != 1)
        return ", ".join(changed) or "nothing"

    @property
    def is_nothing(self) -> bool:
        """Whether it changes nothing."""
        return all(factor == 1 for factor in self.factors().values())

    # What it changes -------------------------------------------------------------------------

    def request(self, request: PlanRequest) -> PlanRequest:
        """The question of the changed world: links, speeds of devices, seconds of operators.

        Raises:
            ValueError: there is no such device or operator, or nothing would take time any more.
        """
        self.check_names(request.num_devices, [operator.name for operator in request.graph])
        cluster = self.links(request.cluster)
        costs = self._costs(request.costs)
        if not any(
            c.forward_s or c.backward_s for p in costs.profiles for c in p.operators.values()
        ):
            raise ValueError(
                "what_if.operators leaves no operator that takes time, so that a step would take "
                "0 s; leave at least one above 0"
            )
        if any(factor != 1 for factor in self.device.values()):
            cluster, costs = self._devices(cluster, costs)
        return replace(request, cluster=cluster, costs=costs)

    def links(self, cluster: Cluster) -> Cluster:
        """The cluster with the changed links."""
        if self.bandwidth == self.latency == 1:
            return cluster
        rack, spine = cluster.rack_link, cluster.spine_link
        return replace(
            cluster,
            host_link=self._link(cluster.host_link),
            rack_link=None if rack is None else self._link(rack),
            spine_link=None if spine is None else self._link(spine),
            host_links=tuple(HostLink(h.host, self._link(h.link)) for h in cluster.host_links),
        )

    def step(self, step: StepCosts) -> StepCosts:
        """What comes besides: faster input; what a faster device does itself."""
        faster = {d: seconds / self.speed(d) for d, seconds in step.optimizer_s.items()}
        return replace(
            step,
            data_s=step.data_s / self.input,
            input_bytes=step.input_bytes / self.input,
            feed_s=step.feed_s / self.compute,
            loss_s=step.loss_s / self.compute,
            loss_backward_s=step.loss_backward_s / self.compute,
            turn_s=step.turn_s / self.compute,
            optimizer_s=faster,
        )

    def messages(self, costs: ProgramCosts) -> ProgramCosts:
        """The costs with fewer or more bytes on the way."""
        if self.bytes == 1:
            return costs
        return replace(
            costs,
            forward_bytes={pair: self._bytes(b) for pair, b in costs.forward_bytes.items()},
            backward_bytes={pair: self._bytes(b) for pair, b in costs.backward_bytes.items()},
            buckets=tuple(replace(b, size_bytes=b.size_bytes * self.bytes) for b in costs.buckets),
        )

    def speed(self, device: int) -> float:
        """How many times as fast a device is."""
        return self.compute * self.device.get(device, 1.0)

    def _bytes(self, size: MessageBytes) -> MessageBytes:
        return MessageBytes(size.per_unit * self.bytes, size.fixed * self.bytes)

    def _link(self, link: Link) -> Link:
        return replace(
            link,
            bandwidth_bytes_per_s=min(LARGEST, link.bandwidth_bytes_per_s * self.bandwidth),
            latency_s=link.latency_s * self.latency,
        )

    def _costs(self, costs: Costs) -> Costs:
        if self.compute == 1 and not self.operators:
            return costs
        return Costs(
            tuple(
                scaled(profile, self.compute, profile.device, self.operators)
                for profile in costs.profiles
            )
        )

    def _devices(self, cluster: Cluster, costs: Costs) -> tuple[Cluster, Costs]:
        """Makes devices of another speed a kind of their own."""
        profiles: list[Profile] = []
        kinds = {}
        for index, device in enumerate(cluster.devices):
            known = costs.kind_for(device.kind)
            factor = self.device.get(index, 1.0)
            kinds[index] = device.kind if factor == 1 else f"{device.kind} x{factor:g}"
            if kinds[index] in (known, *(profile.device for profile in profiles)):
                continue
            profiles += [scaled(p, factor, kinds[index]) for p in costs.by_kind[known]]
        devices = tuple(
            replace(device, kind=kinds[index]) for index, device in enumerate(cluster.devices)
        )
        kept = tuple(p for p in costs.profiles if p.device not in {q.device for q in profiles})
        return replace(cluster, devices=devices), Costs((*kept, *profiles))

    def check_names(self, num_devices: int, operators: Collection[str]) -> None:
        """Checks that what is changed is there.

        Raises:
            ValueError: there is no such device or operator; the text says which there are.
        """
        for device in self.device:
            if device not in range(num_devices):
                raise ValueError(
                    f"what_if.device.{device}: there is no device {device!r}; the cluster has "
                    f"{num_devices} (0 … {num_devices - 1})"
                )
        for name in self.operators:
            if name not in operators:
                raise ValueError(f"what_if.operators.{name}: {_unknown(name, operators)}")


def has_input(step: StepCosts) -> bool:
    """Whether reading a mini-batch and copying it to the device takes time."""
    return step.data_s > 0 or step.host_link is not None


def scaled(
    profile: Profile, speed: float, kind: str, operators: Mapping[str, float] | None = None
) -> Profile:
    """A profile of faster devices.

    Args:
        profile: the costs.
        speed: how many times as fast.
        kind: their kind.
        operators: operator -> factor of its seconds besides.
    """
    factors = operators or {}
    return replace(
        profile,
        device=kind,
        operators={
            name: _scaled(cost, factors.get(name, 1.0) / speed)
            for name, cost in profile.operators.items()
        },
    )


def _scaled(cost: OpProfile, factor: float) -> OpProfile:
    return replace(cost, forward_s=cost.forward_s * factor, backward_s=cost.backward_s * factor)


def _unknown(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3) or sorted(known)[:3]
    return f"the model has no operator {name!r} among its {len(known)}; such as {', '.join(close)}"
