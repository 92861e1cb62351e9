"""Does a model compute the same in chunks? Found out before training, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from lightning_gpp.capture import CapturedModel
from lightning_gpp.capture.checks.check import is_close
from lightning_gpp.capture.checks.rollback import rollback, set_training
from lightning_gpp.gnn.chunked_model import ChunkedModel, chosen
from lightning_gpp.gnn.chunks import Chunks
from lightning_gpp.gnn.errors import REMEDY, GraphTrainingError
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
    expected, again = (pytree.tree_leaves(captured.call(tensors)) for _ in range(2))
    pairs = list(zip(expected, again, pytree.tree_leaves(found), strict=True))
    tensors_of = [pair for pair in pairs if isinstance(pair[0], Tensor)]
    if any(not is_close(two, one) for one, two, _ in tensors_of):
        return
    if any(not is_close(other, one) for one, _, other in tensors_of):
        raise GraphTrainingError(
            f"{type(captured.module).__name__} computes something else on the whole graph than its "
            "operators do, which were captured with a small one; give "
            "GNNPipeStrategy(mode='exact'), which captures the graph itself"
        )


def _checked(model: ChunkedModel, operator: OpNode, values: Mapping[str, Any]) -> dict[str, Any]:
    """The outputs of an operator for all vertices, which those for chunks agree with."""
    outputs = [value.name for value in operator.outputs]
    stage = model.stage([operator.name], operator.inputs, outputs)
    given = [values[name] for name in operator.inputs]
    model.around.histories.clear()
    with model.filling():
        whole = stage(given, None, training=True)
    staying = model.graph.staying
    for chunk in range(0, len(model.chunks), -(-len(model.chunks) // MOST_CHUNKS)):
        vertices = model.chunks.vertices[chunk]
        dims = [model.graph.batch_dims[name] for name in operator.inputs]
        cut = [
            value if name in staying or dim == (None,) else chosen(value, vertices)
            for name, value, dim in zip(operator.inputs, given, dims, strict=True)
        ]
        found = _tried(operator, model, partial(stage, cut, chunk, training=True))
        expected = [
            chosen(value, vertices) if None not in model.graph.batch_dims[name] else value
            for name, value in zip(outputs, whole, strict=True)
        ]
        _compare(operator, model, expected, found)
    return dict(zip(outputs, whole, strict=True))


def _tried(operator: OpNode, model: ChunkedModel, run: Callable[[], Any]) -> Any:
    try:
        return run()
    except GraphTrainingError:
        raise
    except Exception as error:  # the code of a layer may raise anything
        raise GraphTrainingError(
            f"{_named(operator, model)} does not run on a chunk of vertices "
            f"({type(error).__name__}: {error}); {REMEDY}"
        ) from error


def _compare(
    operator: OpNode, model: ChunkedModel, expected: Sequence[Any], found: Sequence[Any]
) -> None:
    pairs = zip(pytree.tree_leaves(list(expected)), pytree.tree_leaves(list(found)), strict=True)
    for one, other in pairs:
        if isinstance(one, Tensor) and not is_close(other, one):
            raise GraphTrainingError(
                f"{_named(operator, model)} computes something else in chunks: what it gives a "
                f"vertex depends on others beside those that edges lead from; {REMEDY}"
            )


def _named(operator: OpNode, model: ChunkedModel) -> str:
    layer = dict(model.captured.module.named_modules()).get(operator.target)
    return f"the layer {operator.target} ({type(layer).__name__ if layer else operator.target})"


class _WithoutDropout(TorchFunctionMode):
    """Dropouts change nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func in DROPOUTS else func(*args, **(kwargs or {}))
