"""The strategy for one graph that does not fit: ``Trainer(strategy="gnnpipe", devices=N)``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from lightning_gpp.common.checks import check_whole
from lightning_gpp.gnn import Techniques
from lightning_gpp.gnn.history import REFRESH_EVERY
from lightning_gpp.planner import BALANCED
from lightning_gpp.schedule import GPIPE, GPIPE_REVERSED
from lightning_gpp.strategy.base import BaseStrategy
from lightning_gpp.strategy.devices.devices_at_hand import ClusterLike
from lightning_gpp.strategy.ranks.pipelines import StartMethod
from lightning_gpp.strategy.settings import (
    CacheLike,
    CostsLike,
    FullGraph,
    PlanLike,
    Report,
    Settings,
    check_name,
    resolve_costs,
)
from lightning_gpp.strategy.state.saving import StateDictType

MODES = ("historical", "exact")
BEGINNINGS = ("zeros", "exact")


class GNNPipeStrategy(BaseStrategy):
    """Trains a graph network on one full graph, its layers divided over the devices.

    Vertices go through the layers in chunks, as micro-batches do. What a layer reads of vertices
    that are not computed yet comes from a history (GNNPipe, arXiv 2308.10087), so training in mode
    ``"historical"`` is approximate; validation, test and prediction are exact in every mode. The
    user's step runs once per batch, which is the graph, and sees the outputs of all vertices.

    Args:
        chunks: number of chunks, over all ways together; by default four per device.
        mode: ``"historical"``, or ``"exact"``: every layer reads current values of all vertices,
            which equals training on one device. Without ``ways``, devices then divide the memory
            only, because no two of them work at the same time.
        ways: devices that divide the vertices of every chunk (graph parallelism) and exchange the
            rows that their layers read. There are ``devices / ways`` groups of layers. ``ways``
            equal to the number of devices, with mode ``"exact"``, is graph parallelism alone.
        shuffle: whether the order of the chunks is drawn anew every epoch.
        refresh_every: epochs between refreshes of the history.
        historical_gradients: whether vertices get last epoch's gradients from chunks whose backward
            comes later. Without, the gradients that they do get count twice.
        history: how the history begins: ``"zeros"``, as published, or ``"exact"``, with one exact
            pass.
        seed: seed of the partition and of the order of the chunks; by default that of ``torch``,
            which ``seed_everything`` sets.
        planner: name of the planner; by default ``"balanced"``: one stage per device, of equal
            work.
        plan: as in :class:`~lightning_gpp.GraphPipeStrategy`, like all arguments that follow.

    Raises:
        ValueError: a number makes no sense.
    """

    def __init__(
        self,
        chunks: int | None = None,
        mode: Literal["historical", "exact"] = "historical",
        *,
        ways: int = 1,
        shuffle: bool = True,
        refresh_every: int = REFRESH_EVERY,
        historical_gradients: bool = False,
        history: Literal["zeros", "exact"] = "zeros",
        seed: int | None = None,
        planner: str | None = None,
        plan: PlanLike | None = None,
        module: str | None = None,
        leaf_modules: Sequence[type | str] = (),
        cluster: ClusterLike | None = None,
        cache: CacheLike = True,
        costs: CostsLike | None = None,
        use_all_devices: bool = True,
        state_dict_type: StateDictType = "full",
        report: Report = "short",
        timeout: float = 1800.0,
        start_method: StartMethod = "popen",
        **lightning: Any,
    ) -> None:
        check_name("mode", mode, MODES)
        check_name("history option", history, BEGINNINGS)
        check_whole("ways", ways)
        if chunks is not None:
            check_whole("chunks", chunks)
        full_graph = None
        if mode != "exact" or ways > 1:
            techniques = Techniques(shuffle, refresh_every, historical_gradients)
            chunks = 1 if mode == "exact" else chunks
            full_graph = FullGraph(chunks, techniques, history == "exact", seed, ways)
        settings = Settings(
            num_microbatches=1 if full_graph is None else None,
            schedule=(GPIPE if full_graph is None else GPIPE_REVERSED).name,
            planner=planner or BALANCED,
            plan=plan,
            module=module,
            leaf_modules=tuple(leaf_modules),
            timeout_s=timeout,
            cluster=cluster,
            cache=cache,
            use_all_devices=use_all_devices,
            costs=resolve_costs(costs),
            report=report,
            full_graph=full_graph,
        )
        check_name("state_dict_type", state_dict_type, get_args(StateDictType))
        super().__init__(settings, start_method=start_method, **lightning)
        self.state_dict_type = state_dict_type
