"""What operators cost on a chunk of vertices, measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_gpp.capture.profiling.profiler import OperatorProbe, profile_probes
from lightning_gpp.cost import Costs
from lightning_gpp.gnn.chunked_model import ChunkedModel, ChunkStage


@dataclass(frozen=True, slots=True)
class _OnOneChunk:
    """An operator on one chunk; there are the histories of one operator, as all take much memory.

    Attributes:
        operator: its name.
        stage: that runs it.
        chunk: the chunk.
        history_bytes: of the operators that have run, the one that ran last is last.
    """

    operator: str
    stage: ChunkStage
    chunk: int
    history_bytes: dict[str, int]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stage, name)

    def __call__(self, values: Sequence[Any], *, training: bool) -> Sequence[Any]:
        model = self.stage.model
        if next(reversed(self.history_bytes), "") != self.operator:
            model.forget()
        made = self.stage(values, self.chunk, training=training)
        sizes = [history.size_bytes for history in model.around.histories.values()]
        self.history_bytes.pop(self.operator, None)
        self.history_bytes[self.operator] = sum(sizes)
        return made


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
    probes, history_bytes = [], dict[str, int]()
    for operator in model.graph:
        outputs = [value.name for value in operator.outputs]
        stage = model.stage([operator.name], operator.inputs, outputs)
        probe = _OnOneChunk(operator.name, stage, chunk, history_bytes)
        probes.append(OperatorProbe(captured, operator, device, probe))
    vertices = model.chunks.vertices[chunk].to(device)
    cut = {
        name: tensor if name in model.graph.staying else tensor.index_select(0, vertices)
        for name, tensor in tensors.items()
    }
    with torch.enable_grad():
        found = profile_probes(probes, cut, float(len(vertices)))
    model.forget()
    operators = {
        name: replace(
            cost,
            activation_bytes=cost.activation_bytes + history_bytes.get(name, 0) // len(sizes),
        )
        for name, cost in found.operators.items()
    }
    return Costs((replace(found, operators=operators),))
