"""A module's forward as ATen operators, by ``torch.export``.

The operators are those that a module calls (``linear``, ``layer_norm``,
``scaled_dot_product_attention``), not decomposed further. Sizes, Python numbers and the training
flags of all modules are those of the call: another call of other sizes is another export.

The module itself is exported with tensors on the CPU that stand for its parameters, so that it can
be exported while its real ones are divided over devices.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_gpp.common.tensor_places import exchange_tensors, tensor_places
from lightning_gpp.spmd.operator_graph import SpmdGraph
from lightning_gpp.spmd.run.node_reader import ExportError, NodeReader
from lightning_gpp.spmd.run.operator_calls import OperatorCall


@dataclass(frozen=True, slots=True)
class CallForm:
    """What of a forward's arguments and results are tensors; only rank 0 has it.

    Attributes:
        arguments: names of the tensor arguments among the flat arguments, None where a constant is.
        structure: of the result.
        results: for every leaf of the result the name of its value, or the constant itself.
    """

    arguments: tuple[str | None, ...]
    structure: pytree.TreeSpec
    results: tuple[tuple[str | None, Any], ...]

    def inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensor arguments by name; one that the forward does not read is left out."""
        leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
        return {name: leaf for name, leaf in zip(self.arguments, leaves, strict=True) if name}

    def result(self, outputs: Sequence[Tensor]) -> Any:
        """What the forward returns, from its tensors in order."""
        found = iter(outputs)
        leaves = [constant if name is None else next(found) for name, constant in self.results]
        return pytree.tree_unflatten(leaves, self.structure)


@dataclass(frozen=True, slots=True)
class ExportedForward:
    """A forward as a graph for planners and as calls that run.

    Attributes:
        graph: its operators; names of parameters and buffers are relative to the exported module.
        calls: how each operator of the graph is called, in its order.
        constants: tensors that the forward makes of Python data, by name; on the CPU.
        form: of its arguments and results.
    """

    graph: SpmdGraph
    calls: tuple[OperatorCall, ...]
    constants: Mapping[str, Tensor]
    form: CallForm


def export_forward(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> ExportedForward:
    """Exports ``module.forward(*args, **kwargs)`` in the module's present training mode.

    Whether values need gradients follows from the parameters', the arguments' and
    ``torch.is_grad_enabled()``.

    Args:
        module: left as it is; its parameters may be on ``meta``.
        args: of the forward; only shapes and types of tensors count.
        kwargs: likewise, by name.

    Raises:
        ExportError: it cannot be captured.
    """
    given = (tuple(args), dict(kwargs or {}))
    stand_ins: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(_stand_in, given)
    # Where it fails, torch prints all operators up to there, twice.
    with _standing_in(module), warnings.catch_warnings(), redirect_stderr(StringIO()) as said:
        warnings.simplefilter("ignore")
        try:
            with torch.enable_grad():
                program = torch.export.export(module, *stand_ins, strict=False)
        except Exception as error:
            raise _error(module, error) from error
    sys.stderr.write(said.getvalue())
    reader = NodeReader(module)
    reader.read_inputs(program, pytree.tree_leaves(stand_ins))
    reader.read(program.graph_module)
    results = reader.results(program)
    names = [str(result) for result in results if reader.is_value(result)]
    graph = reader.graph(names)
    arguments = tuple(name if name in graph.value_of else None for name in reader.arguments)
    leaves = tuple((str(r), None) if reader.is_value(r) else (None, r) for r in results)
    form = CallForm(arguments, program.call_spec.out_spec, leaves)
    return ExportedForward(graph, tuple(reader.calls), reader.constants, form)


def _stand_in(leaf: Any) -> Any:
    """A tensor without the values of another one, on the CPU."""
    if not isinstance(leaf, Tensor):
        return leaf
    made = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
    return made.requires_grad_(leaf.requires_grad)


@contextmanager
def _standing_in(module: nn.Module) -> Iterator[None]:
    """The module's parameters and buffers are on the CPU in this, memory that nobody touches."""
    before = [(place, place.tensor) for place in tensor_places(module)]
    exchange_tensors(module, lambda old: None if old.device.type == "cpu" else _stand_in(old))
    try:
        yield
    finally:
        for place, tensor in before:
            place.put(tensor)


def _error(module: nn.Module, error: Exception) -> ExportError:
    frames = traceback.extract_tb(error.__traceback__)
    if any(frame.name == "_detect_is_causal_mask" for frame in frames):
        return ExportError(
            f"the forward of {type(module).__name__} has torch look at the numbers of a mask, to "
            "see whether it is a causal one: say so, with is_causal=True or is_causal=False beside "
            "the mask of nn.TransformerEncoder or nn.TransformerDecoder (tgt_is_causal)"
        )
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return ExportError(
        f"the forward of {type(module).__name__} cannot be captured at the level of operators "
        f"(torch.export: {type(error).__name__}: {reason[0][:300]}). What it computes must not "
        "depend on the values of tensors (use torch.where in the place of if), nor call code that "
        "is not torch. Name the part that can be captured with HAPStrategy(module=...), or use "
        'strategy="graphpipe".'
    )
