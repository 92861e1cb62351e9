"""The strategy for one graph that does not fit: ``Trainer(strategy="gnnpipe", devices=N)``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from lightning_gpp.common.checks import check_whole
from lightning_gpp.gnn import Techniques
from lightning_gpp.gnn.history import REFRESH_EVERY
from lightning_gpp.planner import BALANCED
from lightning_gpp.schedule import GPIPE, GPIPE_REVERSED
from lightning_gpp.strategy.graphpipe import GraphPipeStrategy
from lightning_gpp.strategy.settings import FullGraph, check_name

MODES = ("historical", "exact")
BEGINNINGS = ("zeros", "exact")


class GNNPipeStrategy(GraphPipeStrategy):
    """Trains a graph network on one full graph, its layers divided over the devices.

    Vertices go through the layers in chunks, as micro-batches do. What a layer reads of vertices
    that are not computed yet comes from a history (GNNPipe, arXiv 2308.10087), so training in mode
    ``"historical"`` is approximate; validation, test and prediction are exact in every mode. The
    user's step runs once per batch, which is the graph, and sees the outputs of all vertices.

    Args:
        chunks: that the vertices are divided into; by default four per device, of all ways
            together.
        mode: ``"historical"``, or ``"exact"``: every layer sees all vertices as they are, which
            equals training on one device. Layers that are divided over devices divide the memory
            alone then, as no two work at once; see ``ways``.
        ways: devices that divide the vertices of every chunk among themselves (graph parallelism)
            and exchange what their layers read of each other. There are ``devices / ways`` groups
            of layers. With as many ways as devices and mode ``"exact"`` this is graph parallelism
            alone.
        shuffle: whether the order of the chunks is drawn anew every epoch.
        refresh_every: epochs for which what is read out of histories stays the same.
        historical_gradients: whether vertices get the last epoch's gradients from chunks whose
            backward comes later; without, those that are there already count twice.
        history: ``"zeros"``, what histories begin with as published, or ``"exact"``: one pass in
            which every layer sees all vertices.
        seed: of the division and of the order of chunks; by default the seed of ``torch``, which
            ``seed_everything`` sets.
        planner: name of the planner; by default ``"balanced"``: one stage per device, of equal
            work.
        options: of :class:`GraphPipeStrategy`, those left out that cut batches (``schedule``,
            ``num_microbatches``, ``weights``), and ``compile``.

    Raises:
        ValueError: a number makes no sense, or an option is of another strategy.
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
        **options: Any,
    ) -> None:
        refused = {"schedule", "num_microbatches", "weights", "blocks", "compile"} & options.keys()
        if refused:
            raise ValueError(
                f"{', '.join(sorted(refused))}: not for full-graph training, whose micro-batches "
                "are the chunks of one graph; see chunks and mode"
            )
        check_name("mode", mode, MODES)
        check_name("history option", history, BEGINNINGS)
        check_whole("ways", ways)
        if chunks is not None:
            check_whole("chunks", chunks)
        techniques = Techniques(shuffle, refresh_every, historical_gradients)
        super().__init__(planner=planner or BALANCED, **options)
        if mode == "exact" and ways == 1:
            self.settings = replace(self.settings, schedule=GPIPE.name, num_microbatches=1)
            return
        chunks = 1 if mode == "exact" else chunks
        full_graph = FullGraph(chunks, techniques, history == "exact", seed, ways)
        self.settings = replace(self.settings, schedule=GPIPE_REVERSED.name, full_graph=full_graph)
