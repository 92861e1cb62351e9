"""What operators cost on a chunk of vertices, measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
        operator: whose turn it is.
        history_bytes: by the name of an operator; of those whose turn it has been.
    """

    model: ChunkedModel
    operator: str = ""
    history_bytes: dict[str, int] = field(default_factory=dict)

    def take(self, operator: str) -> None:
        """Leaves the histories of other operators behind."""
        if operator != self.operator:
            histories = self.model.around.histories.values()
            self.history_bytes[self.operator] = sum(each.size_bytes for each in histories)
            self.model.forget()
            self.operator = operator


@dataclass(frozen=True, slots=True)
class _OnOneChunk:
    """An operator on one chunk."""

    operator: str
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
        self.turn.take(self.operator)
        return self.stage(values, self.chunk, training=training)


def chunk_costs(model: ChunkedModel, tensors: Mapping[str, Tensor]) -> Costs:
    """Measures every operator on the chunk of middle size, reads of histories included.

    Samples are the vertices of all ways together. What histories take is told as activations, a
    part with every chunk: all forwards come before the backwards, so that all parts are kept. The
    model is left as it was.

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
        stage = model.stage([operator.name], operator.inputs, outputs)
        probe = _OnOneChunk(operator.name, stage, chunk, turn)
        probes.append(OperatorProbe(captured, operator, device, probe))
    vertices = model.chunks.vertices[chunk].to(device)
    cut = {
        name: tensor if name in model.graph.staying else tensor.index_select(0, vertices)
        for name, tensor in tensors.items()
    }
    with torch.enable_grad():
        found = profile_probes(captured, probes, cut, float(len(vertices)))
    turn.take("")
    operators = {
        name: replace(
            cost,
            activation_bytes=cost.activation_bytes + turn.history_bytes.get(name, 0) // len(sizes),
        )
        for name, cost in found.operators.items()
    }
    return Costs((replace(found, operators=operators),))
