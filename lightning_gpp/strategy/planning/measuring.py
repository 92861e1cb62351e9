"""Costs of a model on every kind of device that the ranks have.

One rank of every kind measures on its own device, all at the same time; rank 0 puts the profiles
together, so that a planner sees how much faster a GPU of the pool is than its CPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_gpp.capture import CapturedModel, placed, profile_costs
from lightning_gpp.cost import Costs
from lightning_gpp.gnn import ChunkedModel, chunk_costs
from lightning_gpp.strategy.devices.devices_at_hand import DeviceAtHand
from lightning_gpp.strategy.planning.plan_cache import PlanCache
from lightning_gpp.strategy.ranks.control import Control
from lightning_gpp.strategy.settings import Settings


@dataclass(frozen=True, slots=True)
class Measured:
    """Costs, and what the user should know of where they are from."""

    costs: Costs
    notes: tuple[str, ...] = ()


def measuring_ranks(found: Sequence[DeviceAtHand]) -> dict[str, int]:
    """Kind of device -> the rank that measures on it, the first that has one.

    Args:
        found: the devices of all ranks, by rank.
    """
    ranks: dict[str, int] = {}
    for rank, device in enumerate(found):
        ranks.setdefault(device.kind, rank)
    return ranks


def measure_kinds(
    settings: Settings,
    captured: CapturedModel,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    found: Sequence[DeviceAtHand],
    control: Control,
    device: torch.device,
    chunked: ChunkedModel | None = None,
) -> Measured | None:
    """All ranks: on rank 0 the costs on every kind of device; None elsewhere.

    Args:
        settings: what the user asked for.
        captured: the model, the same on all ranks.
        args: the micro-batch that it was captured with.
        kwargs: its keyword arguments.
        found: on rank 0 the devices of all ranks, by rank.
        control: between the ranks.
        device: of this rank.
        chunked: the model in chunks of one graph, if that is how it runs.
    """
    ranks: dict[str, int] = control.share(measuring_ranks(found), "hearing which ranks measure")
    own = None
    if control.rank in ranks.values():
        inputs = captured.inputs(args, kwargs)
        if all(tensor.device != device for tensor in inputs.values()):
            args, kwargs = placed((tuple(args), dict(kwargs)), device)
        if chunked is None:
            own = PlanCache(settings.cache).costs(
                captured, device, lambda: profile_costs(captured, args, kwargs)
            )
        else:
            costs = chunk_costs(chunked, captured.inputs(args, kwargs))
            own = costs, (chunked.chunks.describe(),)
    gathered = control.gather(own, "measuring the model on every kind of device")
    return together([each for each in gathered if each is not None]) if gathered else None


def together(measured: Sequence[tuple[Costs, tuple[str, ...]]]) -> Measured:
    """The costs and notes of several ranks as one."""
    profiles = [profile for costs, _ in measured for profile in costs.profiles]
    notes = [note for _, of_rank in measured for note in of_rank]
    return Measured(Costs(tuple(profiles)), tuple(dict.fromkeys(notes)))
