"""The nodes of an exported program as calls of operators, and as the graph that planners read.

Parameters that are tied are one value; what runs in ``torch.no_grad()`` is among the other calls,
marked; checks of sizes are dropped. Every call runs once on tensors without values, which tells
sizes, gradients and work.

Operators in place become such that make new tensors: on several devices a value may be there in
several placements, of which a change would change one. ``x.relu_()`` becomes ``x' = x.relu()`` and
later readers of ``x`` read ``x'``. Buffers alone are changed in place: they are what the change is
for.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.utils.flop_counter import FlopCounterMode

from lightning_gpp.graph.tensor_spec import TensorSpec
from lightning_gpp.spmd.operator_graph import SpmdGraph, SpmdOperator, SpmdValue, ValueSource
from lightning_gpp.spmd.run.operator_calls import Operand, OperatorCall, tensors_of


class ExportError(RuntimeError):
    """A forward cannot be captured at the level of operators; the text says why, and a remedy."""


class _Name(str):
    """The name of a value, told from texts that are arguments."""

    __slots__ = ()


class NodeReader:
    """Reads the nodes of an exported program, one after the other.

    Args:
        module: what was exported.

    Attributes:
        values: parameters, buffers, arguments, and what calls make, by name.
        operators: of the graph.
        calls: how each of them is called.
        constants: tensors made of Python data.
        arguments: names of the arguments that are tensors, None for others.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.values: dict[str, SpmdValue] = {}
        self.operators: list[SpmdOperator] = []
        self.calls: list[OperatorCall] = []
        self.constants: dict[str, Tensor] = {}
        self.arguments: list[str | None] = []
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._tensors: dict[str, Tensor] = {}
        self._named: dict[Node, Any] = {}
        self._renamed: dict[str, _Name] = {}
        """Value -> the one that has its place after a change."""
        self._family: dict[str, int] = {}
        """Value -> the values that share its memory, by a number."""

    def graph(self, outputs: Sequence[str]) -> SpmdGraph:
        """What was read, without what is given and nobody reads."""
        read = {*outputs, *(name for each in self.operators for name in each.inputs)}
        values = tuple(v for v in self.values.values() if not v.is_given or v.name in read)
        return SpmdGraph(values, tuple(self.operators), tuple(outputs))

    # Values ----------------------------------------------------------------------------------

    def _add(self, name: str, tensor: Tensor, source: ValueSource) -> _Name:
        """A value, of which the tensor has the sizes."""
        spec = TensorSpec(tuple(map(int, tensor.shape)), str(tensor.dtype).removeprefix("torch."))
        self.values[name] = SpmdValue(name, spec, source, tensor.requires_grad)
        self._tensors[name] = tensor
        return _Name(name)

    def _begin(
        self, name: str, like: Tensor, source: ValueSource, *, is_trained: bool = False
    ) -> _Name:
        with self._fake:
            tensor = torch.empty(like.shape, dtype=like.dtype)
        return self._add(name, tensor.requires_grad_(is_trained), source)

    def _constant(self, name: str, tensor: Tensor) -> _Name:
        self.constants[name] = tensor.detach().cpu()
        return self._begin(name, tensor, ValueSource.BUFFER)

    def read_inputs(self, program: torch.export.ExportedProgram, given: Iterable[Any]) -> None:
        """Parameters, buffers, constants and the given arguments; tied ones are one."""
        canonical, leaves, has_grad = self._canonical_names(), iter(given), torch.is_grad_enabled()
        trained = {n for n, p in self.module.named_parameters() if p.requires_grad and has_grad}
        kinds = torch.export.graph_signature.InputKind
        holders = [n for n in program.graph.nodes if n.op == "placeholder"]
        for node, spec in zip(holders, program.graph_signature.input_specs, strict=True):
            value, target = node.meta.get("val"), str(spec.target)
            if spec.kind in (kinds.PARAMETER, kinds.BUFFER):
                name, is_buffer = canonical[target], spec.kind is kinds.BUFFER
                source = ValueSource.BUFFER if is_buffer else ValueSource.PARAMETER
                self._named[node] = self._begin(name, value, source, is_trained=name in trained)
            elif spec.kind is kinds.CONSTANT_TENSOR:
                self._named[node] = self._constant(target, program.constants[target])
            else:
                leaf, is_tensor = next(leaves), isinstance(value, Tensor)
                self.arguments.append(node.name if is_tensor else None)
                self._named[node] = value
                if is_tensor:
                    flows = leaf.requires_grad and has_grad
                    source = ValueSource.INPUT
                    self._named[node] = self._begin(node.name, value, source, is_trained=flows)

    def _canonical_names(self) -> dict[str, str]:
        """Every name of a parameter or buffer -> its first one."""
        first: dict[int, str] = {}
        found = {}
        for named in (self.module.named_parameters, self.module.named_buffers):
            for name, tensor in named(remove_duplicate=False):
                found[name] = first.setdefault(id(tensor), name)
        return found

    def _resolved(self, argument: Any) -> Any:
        """An argument with the present names of values in the place of nodes."""
        if isinstance(argument, Node):
            return self._resolved(self._named[argument])
        if isinstance(argument, tuple | list):
            return [self._resolved(each) for each in argument]
        while isinstance(argument, _Name) and argument in self._renamed:
            argument = self._renamed[argument]
        return argument

    def results(self, program: torch.export.ExportedProgram) -> list[Any]:
        """Every leaf of the forward's result: the name of a value, or a constant."""
        (node,) = [n for n in program.graph.nodes if n.op == "output"]
        found: list[Any] = self._resolved(node.args[0])
        return found

    @staticmethod
    def is_value(result: Any) -> bool:
        """Whether a leaf of the result is the name of a value, and no text."""
        return isinstance(result, _Name)

    # Calls -----------------------------------------------------------------------------------

    def read(self, graph_module: GraphModule, *, prefix: str = "", is_recorded: bool = True) -> Any:
        """The calls of a graph; what it returns."""
        for node in graph_module.graph.nodes:
            if node.op == "output":
                return self._resolved(node.args[0])
            if node.op == "get_attr":
                found = attrgetter(str(node.target))(graph_module)
                if isinstance(found, Tensor):
                    found = self._constant(f"{prefix}{node.target}", found)
                self._named[node] = found
            elif node.op == "call_function":
                self._named[node] = self._call(node, prefix, is_recorded)
        raise AssertionError("a graph without an output")

    def _call(self, node: Node, prefix: str, is_recorded: bool) -> Any:
        target = node.target
        if target is operator.getitem:
            holder, index = node.args
            return self._named[holder][index]  # type: ignore[index]
        if isinstance(target, torch._ops.HigherOrderOperator):
            return self._inline(node, prefix, is_recorded)
        if isinstance(target, torch._ops.OpOverload):
            return self._operator(node, target, prefix, is_recorded)
        raise ExportError(
            f"{self._where(node)} computes with sizes or numbers that depend on data "
            f"({target}); make them constants of the forward"
        )

    def _inline(self, node: Node, prefix: str, is_recorded: bool) -> Any:
        """``with torch.no_grad()``: its calls are not recorded."""
        if str(node.target) != "wrap_with_set_grad_enabled":
            raise ExportError(
                f"{self._where(node)} runs in {node.target}, which no device can run a part of; "
                "take the context (autocast, cond, checkpoint) out of the forward: precision is "
                "an option of the Trainer"
            )
        is_enabled, inner, *given = node.args
        body = self._named[inner]  # type: ignore[index]
        holders = [n for n in body.graph.nodes if n.op == "placeholder"]
        self._named |= zip(holders, self._resolved(given), strict=True)
        is_recorded = is_recorded and bool(is_enabled)
        return self.read(body, prefix=f"{prefix}{node.name}.", is_recorded=is_recorded)

    def _operator(
        self, node: Node, target: torch._ops.OpOverload, prefix: str, is_recorded: bool
    ) -> Any:
        if target._schema.name in _DROPPED:
            return None
        if not list(tensors_of(node.meta.get("val"))):
            raise ExportError(
                f"{self._where(node)} takes a number out of a tensor ({target}), so what follows "
                "depends on data; keep it a tensor"
            )
        names = [argument.name for argument in target._schema.arguments]
        nodes = {**dict(zip(names, node.args)), **node.kwargs}
        arguments = {name: self._resolved(argument) for name, argument in nodes.items()}
        target, changed = self._out_of_place(node, target, arguments)
        roles: list[tuple[str, str]] = []
        given = {name: _with_operands(value, name, roles) for name, value in arguments.items()}
        reads = [read for read, _ in roles]
        call = OperatorCall(f"{prefix}{node.name}", str(target), given, is_recorded)
        with self._fake, torch.enable_grad(), FlopCounterMode(display=False) as counter:
            result = call.result([self._tensors[name] for name in reads])
        made = list(tensors_of(result))
        is_one = isinstance(result, Tensor)
        outputs = [call.name] if is_one else [f"{call.name}.{i}" for i in range(len(made))]
        names_made = [
            self._add(n, t, ValueSource.OPERATOR) for n, t in zip(outputs, made, strict=True)
        ]
        if changed is not None:
            self._renamed[changed] = names_made[0]
        else:
            self._note_views(target, given, reads, outputs)
        namespace, kind, _ = call.target.split(".")
        self.calls.append(call)
        self.operators.append(
            SpmdOperator(
                name=call.name,
                kind=kind if namespace == "aten" else f"{namespace}.{kind}",
                inputs=tuple(reads),
                arguments=tuple(role for _, role in roles),
                outputs=tuple(outputs),
                attributes={n: _plain(v) for n, v in arguments.items() if not _has_names(v)},
                flops=float(counter.get_total_flops()) or float(sum(t.numel() for t in made)),
            )
        )
        return _like(node.meta["val"], iter(names_made))

    def _out_of_place(
        self, node: Node, target: torch._ops.OpOverload, arguments: Mapping[str, Any]
    ) -> tuple[torch._ops.OpOverload, str | None]:
        """The operator that makes a new tensor, and the name of the one it stands for.

        Raises:
            ExportError: it changes a parameter, an argument, or memory that a view shares.
        """
        schema = target._schema
        written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        if not written or schema.name.startswith("aten::batch_norm"):
            return target, None
        changed = arguments[written[0]]
        source = self.values[changed].source
        if source is ValueSource.BUFFER:
            return target, None
        namespace, name = schema.name.split("::")
        overloads = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
        found: torch._ops.OpOverload | None = getattr(overloads, target._overloadname, None)
        if source is ValueSource.OPERATOR and changed not in self._family and found is not None:
            return found, changed
        shared = ", whose memory other tensors view" if changed in self._family else ""
        what = "" if source is ValueSource.OPERATOR else f"the {source.value} "
        raise ExportError(
            f"{self._where(node)} changes {what}{changed!r} in place ({target}){shared}; write "
            "what it becomes to a new name"
        )

    def _note_views(
        self,
        target: torch._ops.OpOverload,
        given: Mapping[str, Any],
        reads: Sequence[str],
        outputs: Sequence[str],
    ) -> None:
        """What a call makes that is a view of what it reads shares its memory."""
        for argument in target._schema.arguments:
            operand = given.get(argument.name)
            if argument.alias_info is not None and isinstance(operand, Operand):
                read = reads[operand.index]
                number = self._family.setdefault(read, len(self._family))
                self._family.update(dict.fromkeys(outputs, number))

    def _where(self, node: Node) -> str:
        trace = str(node.meta.get("stack_trace") or "").strip().splitlines()
        line = next((x.strip() for x in reversed(trace) if x.strip().startswith("File")), "")
        place = f" ({line})" if line else ""
        return f"the forward of {type(self.module).__name__}, at {node.name!r}{place},"


def _with_operands(argument: Any, role: str, roles: list[tuple[str, str]]) -> Any:
    """An argument with operands in the place of names, which are added with what they are."""
    if isinstance(argument, _Name):
        roles.append((str(argument), role))
        return Operand(len(roles) - 1)
    if isinstance(argument, list):
        return [_with_operands(each, f"{role}[{i}]", roles) for i, each in enumerate(argument)]
    return argument


def _has_names(argument: Any) -> bool:
    is_list = isinstance(argument, list)
    return any(map(_has_names, argument)) if is_list else isinstance(argument, _Name)


def _like(value: Any, names: Iterator[str]) -> Any:
    """The next names in the form of what an operator returns."""
    if isinstance(value, tuple | list):
        return [_like(each, names) for each in value]
    return next(names) if isinstance(value, Tensor) else None


def _plain(value: Any) -> object:
    """An attribute as planners have it, who know no torch."""
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value).removeprefix("torch.")


_DROPPED = frozenset(
    {
        "aten::_assert_tensor_metadata",
        "aten::_assert_async",
        "aten::_assert_scalar",
        "aten::sym_constrain_range_for_size",
    }
)
"""Checks that hold for the sizes of the export, and compute nothing."""
