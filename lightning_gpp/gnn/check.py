"""Checks before training that a model computes the same in chunks, and measures its cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from lightning_gpp.capture import CapturedModel
from lightning_gpp.capture.checks.check import is_close
from lightning_gpp.capture.checks.rollback import rollback, set_training
from lightning_gpp.capture.profiler import OperatorProbe, profile_probes
from lightning_gpp.cost import Costs
from lightning_gpp.gnn.chunked_model import ChunkedModel, chosen
from lightning_gpp.gnn.chunks import REMEDY, Chunks, GraphTrainingError
from lightning_gpp.gnn.history import Techniques
from lightning_gpp.gnn.message_passing import DROPOUTS
from lightning_gpp.graph import OpNode

MOST_CHUNKS = 4
"""Chunks that are tried; what a layer does wrong on chunks it does on most of them."""


def check_in_chunks(
    captured: CapturedModel,
    tensors: Mapping[str, Tensor],
    chunks: Chunks,
    flags: Mapping[str, bool],
    example: Mapping[str, Tensor] | None = None,
) -> None:
    """Runs every operator in chunks on exact inputs, and compares it with the operator itself.

    In training mode, with dropout left out. The module is left as it was.

    Args:
        captured: the model, captured with the whole graph.
        tensors: arguments of its forward by name.
        chunks: of the vertices, each of one part.
        flags: training flags of the sub-modules in training mode.
        example: the arguments that the model was captured with, if these are others.

    Raises:
        GraphTrainingError: an operator computes something else; the text names it.
    """
    model = ChunkedModel(captured, tensors, chunks, Techniques(), example)
    values: dict[str, Any] = dict(tensors)
    last_reader = {name: operator.name for operator in model.graph for name in operator.inputs}
    kept = set(model.graph.outputs)
    with torch.no_grad(), rollback(captured.module), _WithoutDropout():
        set_training(captured.module, flags)
        for operator in model.graph:
            values |= _checked(model, operator, values)
            for name in operator.inputs:
                if last_reader[name] == operator.name and name not in kept:
                    del values[name]
        if example is not None:
            _check_whole(captured, tensors, values)


def _check_whole(
    captured: CapturedModel, tensors: Mapping[str, Tensor], values: Mapping[str, Any]
) -> None:
    """Compares the operators, captured with a small graph, with the module on the whole one.

    Where the module draws random numbers besides dropout nothing can be told.
    """
    found = captured.output(values, training=True)
    expected = captured.call(tensors)
    if not _are_close(found, expected) and _are_close(captured.call(tensors), expected):
        raise GraphTrainingError(
            f"{type(captured.module).__name__} computes something else on the whole graph than on "
            "the small graph that it was captured with. Use GNNPipeStrategy(mode='exact'), which "
            "captures it with the whole graph"
        )


def _checked(model: ChunkedModel, operator: OpNode, values: Mapping[str, Any]) -> dict[str, Any]:
    """The outputs of an operator for all vertices, which those for chunks agree with."""
    outputs = [value.name for value in operator.outputs]
    stage = model.stage([operator.name], operator.inputs, outputs)
    given = [values[name] for name in operator.inputs]
    model.around.histories.clear()
    staying, dims = model.graph.staying, model.graph.batch_dims
    layer = dict(model.captured.module.named_modules()).get(operator.target)
    named = f"the layer {operator.target} ({type(layer).__name__ if layer else operator.target})"
    try:
        with model.filling():
            whole = stage(given, None, training=True)
        for chunk in range(0, len(model.chunks), -(-len(model.chunks) // MOST_CHUNKS)):
            vertices = model.chunks.vertices[chunk]
            cut = [
                value if name in staying or dims[name] == (None,) else chosen(value, vertices)
                for name, value in zip(operator.inputs, given, strict=True)
            ]
            expected = [
                chosen(value, vertices) if None not in dims[name] else value
                for name, value in zip(outputs, whole, strict=True)
            ]
            if not _are_close(stage(cut, chunk, training=True), expected):
                raise GraphTrainingError(
                    f"{named} computes something else in chunks: its result for a vertex depends "
                    f"on vertices that are not its neighbours; {REMEDY}"
                )
    except GraphTrainingError:
        raise
    except Exception as error:  # the code of a layer may raise anything
        raise GraphTrainingError(
            f"{named} does not run on a chunk of vertices "
            f"({type(error).__name__}: {error}); {REMEDY}"
        ) from error
    return dict(zip(outputs, whole, strict=True))


def _are_close(found: Any, expected: Any) -> bool:
    """Whether the tensors of two values are the same but for rounding."""
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
    return all(is_close(one, other) for one, other in pairs if isinstance(other, Tensor))


class _WithoutDropout(TorchFunctionMode):
    """Dropouts change nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func in DROPOUTS else func(*args, **(kwargs or {}))


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
