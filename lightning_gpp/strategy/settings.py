"""What the user asked of the strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lightning_gpp.capture import BlockGraph
from lightning_gpp.cost import Costs
from lightning_gpp.gnn import Techniques
from lightning_gpp.planner import Plan
from lightning_gpp.planner.base import ONE_VERSION, HeldVersions
from lightning_gpp.schedule import ONE_F_ONE_B_ASYNC
from lightning_gpp.simulate.refit import Refit, load_costs_or_refit
from lightning_gpp.strategy.devices.devices_at_hand import ClusterLike
from lightning_gpp.weights.policies import PIPEOPTIM, POLICIES, Policy

Report = Literal["short", "full"]

PlanLike = Plan | str | Path | Sequence[Any] | dict[str, Any]

CacheLike = bool | str | Path
"""Whether to keep profiles and refits, or the folder to keep them in."""

CostsLike = Costs | Refit | str | Path
"""Costs, a refit, or a file that holds either."""


def resolve_costs(given: CostsLike | None) -> Costs | Refit | None:
    """Reads the costs that the user gave.

    Raises:
        ValueError: the file holds neither costs nor a refit.
        FileNotFoundError: there is no such file.
    """
    if given is None or isinstance(given, (Costs, Refit)):
        return given
    return load_costs_or_refit(given)


@dataclass(frozen=True, slots=True)
class FullGraph:
    """That batches are one graph whose vertices are trained on in chunks, and how.

    Attributes:
        chunks: how many; None for :data:`CHUNKS_PER_RANK` per rank.
        techniques: how histories are used.
        begins_exact: whether histories begin with an exact pass, and not with zeros.
        seed: of the partition and of the order of chunks; None for the Trainer's.
        ways: parts of every chunk, which devices of their own run side by side.
    """

    chunks: int | None = None
    techniques: Techniques = field(default_factory=Techniques)
    begins_exact: bool = False
    seed: int | None = None
    ways: int = 1

    def num_chunks(self, num_ranks: int) -> int:
        """How many chunks there are."""
        return self.chunks or max(1, CHUNKS_PER_RANK * num_ranks // self.ways)


CHUNKS_PER_RANK = 4
"""Chunks per stage in GNNPipe's experiments (arXiv 2308.10087)."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user asked for; see :class:`~lightning_gpp.strategy.GraphPipeStrategy`.

    ``per_update`` is the Trainer's: batches whose gradients are accumulated, the fewest of the run.
    ``is_emulated`` and ``time_scale`` (real seconds that an emulated second takes; None to choose
    it) are the accelerator's.
    """

    num_microbatches: int | None
    schedule: str | None
    planner: str
    plan: PlanLike | None
    module: str | None
    blocks: BlockGraph | None
    leaf_modules: tuple[type | str, ...]
    timeout_s: float
    cluster: ClusterLike | None = None
    cache: CacheLike = True
    use_all_devices: bool = True
    is_emulated: bool = False
    time_scale: float | None = None
    costs: Costs | Refit | None = None
    weights: str | None = None
    full_graph: FullGraph | None = None
    report: Report = "short"
    compile: Mapping[str, Any] | None = None
    per_update: int = 1

    @property
    def is_asynchronous(self) -> bool:
        """Whether several mini-batches are in flight: the pipeline does not drain between them."""
        return self.schedule == ONE_F_ONE_B_ASYNC.name

    @property
    def prefix(self) -> str:
        """Of names in the LightningModule, before those in the module that is pipelined."""
        return f"{self.module}." if self.module else ""

    @property
    def policy(self) -> Policy:
        """With which weights stages run where the pipeline does not drain."""
        return POLICIES[self.weights or PIPEOPTIM.name]

    @property
    def held_versions(self) -> HeldVersions:
        """Copies of their parameters that stages hold."""
        if not self.is_asynchronous:
            return ONE_VERSION
        return HeldVersions(*self.policy.held_versions(self.per_update))
