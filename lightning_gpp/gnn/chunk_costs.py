"""What operators cost on a chunk of vertices, measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_gpp.capture.profiling.profiler import OperatorProbe, profile_probes
from lightning_gpp.cost import Costs
from lightning_gpp.gnn.chunked_model import ChunkedModel
from lightning_gpp.graph import OpNode


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
    history_bytes: dict[str, int] = {}  # the operator that ran last is last

    def probe(operator: OpNode) -> OperatorProbe:
        name, outputs = operator.name, [value.name for value in operator.outputs]
        stage = model.stage([name], operator.inputs, outputs)

        def run(values: Sequence[Any], *, training: bool) -> Sequence[Any]:
            if next(reversed(history_bytes), "") != name:
                model.forget()  # those of one operator are there, as all take much memory
            made = stage(values, chunk, training=training)
            history_bytes.pop(name, None)
            histories = model.around.histories.values()
            history_bytes[name] = sum(history.size_bytes for history in histories)
            return made

        return OperatorProbe(captured, operator, device, stage, run)

    vertices = model.chunks.vertices[chunk].to(device)
    cut = {
        name: tensor if name in model.graph.staying else tensor.index_select(0, vertices)
        for name, tensor in tensors.items()
    }
    with torch.enable_grad():
        found = profile_probes(list(map(probe, model.graph)), cut, len(vertices))
    model.forget()
    operators = {
        name: replace(
            cost,
            activation_bytes=cost.activation_bytes + history_bytes.get(name, 0) // len(sizes),
        )
        for name, cost in found.operators.items()
    }
    return Costs((replace(found, operators=operators),))
