"""A module's forward as ATen operators, by ``torch.export``.

The operators are those that a module calls (``linear``, ``layer_norm``,
``scaled_dot_product_attention``), not decomposed further. Sizes, Python numbers and the training
flags of all modules are those of the call: another call of other sizes is another export.

The module itself is exported with tensors on the CPU that stand for its parameters, so that it can
be exported while its real ones are divided over devices. Every call then runs once on tensors
without values, which tells sizes, gradients and work.

Operators in place become such that make new tensors: on several devices a value may be there in
several placements, of which a change would change one. ``x.relu_()`` becomes ``x' = x.relu()`` and
later readers of ``x`` read ``x'``. Buffers alone are changed in place.
"""

from __future__ import annotations

import operator
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from lightning_gpp.common.tensor_places import exchange_tensors, memory_of, tensor_places
from lightning_gpp.common.transformer_layers import step_by_step, zero_padding
from lightning_gpp.graph.tensor_spec import TensorSpec
from lightning_gpp.spmd.operator_graph import SpmdGraph, SpmdOperator, SpmdValue, ValueSource
from lightning_gpp.spmd.run.changes import PresentNames
from lightning_gpp.spmd.run.operator_calls import Name, call, tensors_of, with_operands


class ExportError(RuntimeError):
    """The forward cannot be exported; the text says why, and a remedy."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """Which arguments and results of a forward are tensors; on rank 0 only.

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
        """Builds the forward's result from its tensors in order."""
        found = iter(outputs)
        leaves = [constant if name is None else next(found) for name, constant in self.results]
        return pytree.tree_unflatten(leaves, self.structure)


@dataclass(frozen=True, slots=True)
class ExportedForward:
    """A forward as a graph, which planners read and ranks run.

    Attributes:
        graph: its operators; names of parameters and buffers are relative to the exported module.
        constants: tensors that the forward makes of Python data, by name; on the CPU.
        form: of its arguments and results.
    """

    graph: SpmdGraph
    constants: Mapping[str, Tensor]
    form: CallForm


def export_forward(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> ExportedForward:
    """Exports ``module.forward(*args, **kwargs)`` in the module's present training mode.

    Whether values need gradients follows from the parameters', the arguments' and
    ``torch.is_grad_enabled()``. Of the arguments only shapes and types count; the module is left
    as it is, and its parameters may be on ``meta``.

    Raises:
        ExportError: it cannot be captured.
    """
    given, has_grad = (tuple(args), dict(kwargs or {})), torch.is_grad_enabled()

    def fill(output: Tensor, padding: Tensor, training: bool) -> Tensor:
        is_left = training or (has_grad and output.requires_grad)
        return output if is_left else zero_padding(output, padding)

    stand_ins: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(_stand_in, given)
    # Where it fails, torch prints all operators up to there, twice.
    with _standing_in(module), warnings.catch_warnings(), redirect_stderr(StringIO()) as said:
        warnings.simplefilter("ignore")
        try:
            with torch.enable_grad(), step_by_step(fill):
                program = torch.export.export(module, *stand_ins, strict=False)
        except Exception as error:
            raise _error(module, error) from error
    sys.stderr.write(said.getvalue())
    reader = _NodeReader(module)
    reader.read_inputs(program, pytree.tree_leaves(stand_ins))
    results = reader.read(program.graph_module)
    graph = reader.graph([result for result in results if isinstance(result, Name)])
    arguments = tuple(name if name in graph.value_of else None for name in reader.arguments)
    leaves = tuple((str(r), None) if isinstance(r, Name) else (None, r) for r in results)
    form = CallForm(arguments, program.call_spec.out_spec, leaves)
    return ExportedForward(graph, reader.constants, form)


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
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return ExportError(
        f"the forward of {type(module).__name__} cannot be captured at the level of operators "
        f"(torch.export: {type(error).__name__}: {reason[0][:300]}). What it computes must not "
        "depend on the values of tensors (use torch.where in the place of if), nor call code that "
        "is not torch. Name the part that can be captured with HAPStrategy(module=...), or use "
        'strategy="graphpipe".'
    )


class _NodeReader:
    """Reads the nodes of an exported program, one after the other.

    Parameters that are tied are one value; what runs in ``torch.no_grad()`` is among the other
    calls, marked; checks of sizes are dropped.

    Args:
        module: what was exported.

    Attributes:
        constants: tensors made of Python data.
        arguments: names of the arguments that are tensors, None for others.
    """

    def __init__(self, module: nn.Module) -> None:
        self.constants: dict[str, Tensor] = {}
        self.arguments: list[str | None] = []
        self._module, self._prefix, self._is_recorded = module, "", True
        self._values: dict[str, SpmdValue] = {}
        self._operators: list[SpmdOperator] = []
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._tensors: dict[str, Tensor] = {}
        self._known: dict[Node, Any] = {}
        self._names = PresentNames(self._added)

    def graph(self, outputs: Sequence[str]) -> SpmdGraph:
        """What was read, without what is given and nobody reads."""
        read = {*outputs, *(name for each in self._operators for name in each.inputs)}
        values = tuple(v for v in self._values.values() if not v.is_given or v.name in read)
        return SpmdGraph(values, tuple(self._operators), tuple(map(str, outputs)))

    # Values ----------------------------------------------------------------------------------

    def _add(self, name: str, tensor: Tensor, source: ValueSource) -> Name:
        """A value, of which the tensor has the sizes."""
        spec = TensorSpec(tuple(map(int, tensor.shape)), str(tensor.dtype).removeprefix("torch."))
        self._values[name] = SpmdValue(name, spec, source, tensor.requires_grad)
        self._tensors[name] = tensor
        return Name(name)

    def _begin(
        self, name: str, like: Tensor, source: ValueSource, *, is_trained: bool = False
    ) -> Name:
        with self._fake:
            tensor = torch.empty(like.shape, dtype=like.dtype)
        return self._add(name, tensor.requires_grad_(is_trained), source)

    def _constant(self, name: str, tensor: Tensor) -> Name:
        self.constants[name] = tensor.detach().cpu()
        return self._begin(name, tensor, ValueSource.BUFFER)

    def read_inputs(self, program: torch.export.ExportedProgram, given: Iterable[Any]) -> None:
        """Parameters, buffers, constants and the given arguments; tied ones are one."""
        first: dict[int, str] = {}
        canonical, trained, has_grad = dict[str, str](), set[str](), torch.is_grad_enabled()
        for named in (self._module.named_parameters, self._module.named_buffers):
            for name, tensor in named(remove_duplicate=False):
                canonical[name] = first.setdefault(id(tensor), name)
                trained |= {name} if tensor.requires_grad and has_grad else set()
        kinds, leaves = torch.export.graph_signature.InputKind, iter(given)
        sources = {kinds.PARAMETER: ValueSource.PARAMETER, kinds.BUFFER: ValueSource.BUFFER}
        holders = program.graph.find_nodes(op="placeholder")
        for node, spec in zip(holders, program.graph_signature.input_specs, strict=True):
            found, target = node.meta.get("val"), str(spec.target)
            if source := sources.get(spec.kind):
                name = canonical[target]
                found = self._begin(name, found, source, is_trained=name in trained)
            elif spec.kind is kinds.CONSTANT_TENSOR:
                found = self._constant(target, program.constants[target])
            else:
                leaf, is_tensor = next(leaves), isinstance(found, Tensor)
                self.arguments.append(node.name if is_tensor else None)
                if is_tensor:
                    flows = leaf.requires_grad and has_grad
                    found = self._begin(node.name, found, ValueSource.INPUT, is_trained=flows)
            self._known[node] = found

    def _resolved(self, argument: Any) -> Any:
        """An argument with the present names of values in the place of nodes."""
        if isinstance(argument, Node):
            return self._resolved(self._known[argument])
        if isinstance(argument, tuple | list):
            return [self._resolved(each) for each in argument]
        return self._names.present(argument) if isinstance(argument, Name) else argument

    # Calls -----------------------------------------------------------------------------------

    def read(self, graph_module: GraphModule) -> Any:
        """The calls of a graph; what it returns, values by their names."""
        for node in graph_module.graph.nodes:
            if node.op == "output":
                return self._resolved(node.args[0])
            if node.op == "get_attr":
                found = attrgetter(str(node.target))(graph_module)
                if isinstance(found, Tensor):
                    found = self._constant(f"{self._prefix}{node.target}", found)
                self._known[node] = found
            elif node.op == "call_function":
                self._known[node] = self._called(node)
        return []

    def _called(self, node: Node) -> Any:
        target = node.target
        if target is operator.getitem:
            holder, index = node.args
            return self._known[holder][index]  # type: ignore[index]
        if isinstance(target, torch._ops.HigherOrderOperator):
            return self._inline(node)
        if isinstance(target, torch._ops.OpOverload):
            return self._operator(node, target)
        raise ExportError(
            f"{self._where(node)} computes with sizes or numbers that depend on data "
            f"({target}); make them constants of the forward"
        )

    def _inline(self, node: Node) -> Any:
        """``with torch.no_grad()``: its calls are not recorded."""
        if str(node.target) != "wrap_with_set_grad_enabled":
            raise ExportError(
                f"{self._where(node)} runs in {node.target}, which cannot be divided over devices. "
                "Move the context (autocast, cond, checkpoint) out of the forward; precision is "
                "an option of the Trainer"
            )
        is_enabled, inner, *given = node.args
        body = self._known[inner]  # type: ignore[index]
        holders = body.graph.find_nodes(op="placeholder")
        self._known |= zip(holders, self._resolved(given), strict=True)
        before = self._prefix, self._is_recorded
        self._prefix += f"{node.name}."
        self._is_recorded = self._is_recorded and bool(is_enabled)
        returned = self.read(body)
        self._prefix, self._is_recorded = before
        return returned

    def _operator(self, node: Node, target: torch._ops.OpOverload) -> Any:
        schema = target._schema
        if not (schema.returns or schema.is_mutable):
            return None  # a check, which holds for the sizes of the export
        if not tensors_of(node.meta.get("val")):
            raise ExportError(
                f"{self._where(node)} reads a number out of a tensor ({target}), so the graph "
                "would depend on the data; keep it a tensor"
            )
        names = [argument.name for argument in schema.arguments]
        nodes = {**dict(zip(names, node.args)), **node.kwargs}
        given = {name: self._resolved(argument) for name, argument in nodes.items()}
        target, changed = self._out_of_place(node, target, given)
        name = f"{self._prefix}{node.name}"
        if changed is not None and schema.name == "aten::copy_":
            new = self._copied(name, given["src"], changed)
        else:
            returned, made = self._call(name, target, given)
            if changed is None:
                memory = {memory_of(self._tensors[each]) for each in made}
                for role, value in given.items():
                    if isinstance(value, Name) and memory_of(self._tensors[value]) in memory:
                        self._names.note_view(target, given, role, made)
                return returned
            new = made[0]
        self._names.change(changed, new)
        return new

    def _copied(self, name: str, source: Name, target: Name) -> Name:
        """One value in the form of another one."""
        like = self._tensors[target]
        sizes = {"self": source, "size": [*like.shape]}
        _, (wide,) = self._call(name, torch.ops.aten.expand.default, sizes)
        if self._tensors[wide].dtype is like.dtype:
            return wide
        return self._added(torch.ops.aten.to.dtype, {"self": wide, "dtype": like.dtype})

    def _added(self, target: torch._ops.OpOverload, given: Mapping[str, Any]) -> Name:
        """Adds a call that is not in the program; the name of the one value that it makes."""
        name = f"{self._prefix}{target._schema.name.split('::')[1]}.{len(self._operators)}"
        return self._call(name, target, given)[1][0]

    def _call(
        self, name: str, target: torch._ops.OpOverload, given: Mapping[str, Any]
    ) -> tuple[Any, list[Name]]:
        """Adds the call of an operator; what it returns, and the names of the tensors in that."""
        roles: list[tuple[str, str]] = []
        arguments = {role: with_operands(value, role, roles) for role, value in given.items()}
        reads, tensors = [read for read, _ in roles], [self._tensors[read] for read, _ in roles]
        with self._fake, torch.enable_grad(), FlopCounterMode(display=False) as counter:
            returned = call(target, arguments, tensors, is_recorded=self._is_recorded)
        made = tensors_of(returned)
        is_one = isinstance(returned, Tensor)
        outputs = [name] if is_one else [f"{name}.{i}" for i in range(len(made))]
        values = [self._add(n, t, ValueSource.OPERATOR) for n, t in zip(outputs, made, strict=True)]
        namespace, kind, _ = str(target).split(".")
        self._operators.append(
            SpmdOperator(
                name,
                kind if namespace == "aten" else f"{namespace}.{kind}",
                tuple(reads),
                tuple(role for _, role in roles),
                tuple(outputs),
                arguments,
                float(counter.get_total_flops()) or float(sum(t.numel() for t in made)),
                str(target),
                self._is_recorded,
            )
        )
        own = iter(values)
        is_tensor = lambda each: next(own) if isinstance(each, Tensor) else None  # noqa: E731
        return pytree.tree_map(is_tensor, returned), values

    def _out_of_place(
        self, node: Node, target: torch._ops.OpOverload, arguments: Mapping[str, Any]
    ) -> tuple[torch._ops.OpOverload, Name | None]:
        """The operator that makes a new tensor, and the name of the one it stands for.

        Raises:
            ExportError: it changes a parameter, an argument, or memory shared in other ways.
        """
        schema = target._schema
        written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        if not written or schema.name.startswith("aten::batch_norm"):
            return target, None
        changed = arguments[written[0]]
        if self._values[changed].source is ValueSource.BUFFER:
            return target, None
        namespace, name = schema.name.split("::")
        overloads = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
        found: torch._ops.OpOverload | None = getattr(overloads, target._overloadname, None)
        roots, why = self._names.roots(changed), ""
        if roots is None:
            why = ", whose memory other tensors view"
        elif (source := self._values[roots[-1]].source) is not ValueSource.OPERATOR:
            why = f", which is or views the {source.value} {roots[-1]!r}"
        elif not self._is_recorded and any(self._tensors[each].requires_grad for each in roots):
            why = " in torch.no_grad(), which its gradient would not know of"
        elif found is not None:
            return found, changed
        raise ExportError(
            f"{self._where(node)} changes {changed!r} in place ({target}){why}; assign "
            "the result to a new name"
        )

    def _where(self, node: Node) -> str:
        trace = str(node.meta.get("stack_trace") or "").strip().splitlines()
        line = next((x.strip() for x in reversed(trace) if x.strip().startswith("File")), "")
        place = f" ({line})" if line else ""
        return f"the forward of {type(self._module).__name__}, at {node.name!r}{place},"
