"""What operators cost on a chunk of vertices, measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_gpp.capture.profiling.operator_probe import OperatorProbe
from lightning_gpp.capture.profiling.profiler import profile_probes
from lightning_gpp.cost import Costs
from lightning_gpp.gnn.chunked_model import ChunkedModel, ChunkStage


@dataclass(slots=True)
class _Turn:
    """Whose histories there are: those of one operator, as all of them take much memory.

    Attributes:
        model: in whose stages operators run.
        stage: whose turn it is.
    """

    model: ChunkedModel
    stage: ChunkStage | None = None

    def take(self, stage: ChunkStage) -> None:
        """Leaves the histories of other stages behind."""
        if stage is not self.stage:
            self.model.forget()
            self.stage = stage


@dataclass(frozen=True, slots=True)
class _OnOneChunk:
    """An operator on one chunk."""

    stage: ChunkStage
    chunk: int
    turn: _Turn

    @property
    def inputs(self) -> tuple[str, ...]:
        return self.stage.inputs

    @property
    def parameter_names(self) -> tuple[str, ...]:
        return self.stage.parameter_names

    @property
    def buffer_names(self) -> tuple[str, ...]:
        return self.stage.buffer_names

    def __call__(self, values: Sequence[Any], *, training: bool) -> Sequence[Any]:
        self.turn.take(self.stage)
        return self.stage(values, self.chunk, training=training)


def chunk_costs(model: ChunkedModel, tensors: Mapping[str, Tensor]) -> Costs:
    """Measures every operator on the chunk of middle size, reads of histories included.

    Samples are the vertices of all ways together. The model is left as it was.

    Args:
        model: in training mode.
        tensors: arguments of its forward by name, on the device that is measured.
    """
    captured, device = model.captured, next(iter(tensors.values())).device
    sizes = model.chunks.sizes
    chunk = sorted(range(len(sizes)), key=sizes.__getitem__)[len(sizes) // 2]
    probes, turn = [], _Turn(model)
    for operator in model.graph:
        outputs = [value.name for value in operator.outputs]
        stage = _OnOneChunk(model.stage([operator.name], operator.inputs, outputs), chunk, turn)
        probes.append(OperatorProbe(captured, operator, device, stage))
    vertices = model.chunks.vertices[chunk].to(device)
    cut = {
        name: tensor if name in model.graph.staying else tensor.index_select(0, vertices)
        for name, tensor in tensors.items()
    }
    with torch.enable_grad():
        found = profile_probes(captured, probes, cut, float(len(vertices)))
    model.forget()
    return Costs((found,))
