"""The nodes of an exported program as calls of operators.

Parameters that are tied are one value; what runs in ``torch.no_grad()`` is among the other calls,
marked; operators in place become such that make new tensors; checks of sizes are dropped.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from lightning_gpp.spmd.run.in_place import InPlace
from lightning_gpp.spmd.run.operator_calls import Operand, OperatorCall, tensors_of


class ExportError(RuntimeError):
    """A forward cannot be captured at the level of operators; the text says why, and a remedy."""


@dataclass(slots=True)
class NodeReader:
    """Reads the nodes of an exported program, one after the other.

    Attributes:
        module: what was exported.
        sources: parameters, buffers and arguments by name: (kind of source, tensor).
        calls: of operators.
        read_by: names of the values that a call reads.
        made_by: likewise, that it makes, with their shapes and types.
        modules: name of a call -> module that calls it.
        constants: tensors made of Python data.
        in_place: what was changed in place.
        named: node -> what it stands for: the name of a value, several, or a constant.
    """

    module: nn.Module
    sources: dict[str, tuple[str, Tensor]] = field(default_factory=dict)
    calls: list[OperatorCall] = field(default_factory=list)
    read_by: dict[str, tuple[str, ...]] = field(default_factory=dict)
    made_by: dict[str, tuple[tuple[str, Tensor], ...]] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)
    in_place: InPlace = field(default_factory=InPlace)
    named: dict[Node, Any] = field(default_factory=dict)

    def read_inputs(self, program: torch.export.ExportedProgram) -> None:
        """Parameters, buffers, constants and arguments; tied ones are one."""
        canonical = _canonical_names(self.module)
        kinds = torch.export.graph_signature.InputKind
        holders = [n for n in program.graph.nodes if n.op == "placeholder"]
        for node, spec in zip(holders, program.graph_signature.input_specs, strict=True):
            value = node.meta.get("val")
            if spec.kind in (kinds.PARAMETER, kinds.BUFFER):
                assert spec.target is not None
                name = canonical[spec.target]
                is_parameter = spec.kind is kinds.PARAMETER
                self.sources[name] = "parameter" if is_parameter else "buffer", value
                self.named[node] = name
            elif spec.kind is kinds.CONSTANT_TENSOR:
                assert spec.target is not None
                self.constants[spec.target] = program.constants[spec.target].detach().cpu()
                self.sources[spec.target] = "buffer", value
                self.named[node] = spec.target
            elif isinstance(value, Tensor):
                self.sources[node.name] = "input", value
                self.named[node] = node.name
            else:
                self.named[node] = _Text(value) if isinstance(value, str) else value

    def read(self, graph_module: GraphModule, *, prefix: str = "", is_recorded: bool = True) -> Any:
        """The calls of a graph; what it returns."""
        for node in graph_module.graph.nodes:
            if node.op == "output":
                return self._resolved(node.args[0])
            if node.op == "get_attr":
                self.named[node] = _attribute(graph_module, str(node.target))
                if isinstance(self.named[node], Tensor):
                    self._constant(node, prefix)
            elif node.op == "call_function":
                self._call(node, prefix, is_recorded)
        raise AssertionError("a graph without an output")

    def _constant(self, node: Node, prefix: str) -> None:
        name, tensor = f"{prefix}{node.target}", self.named[node]
        self.constants[name] = tensor.detach().cpu()
        self.sources[name] = "buffer", tensor
        self.named[node] = name

    def _call(self, node: Node, prefix: str, is_recorded: bool) -> None:
        if node.target is operator.getitem:
            holder, index = node.args
            self.named[node] = self.named[holder][index]  # type: ignore[index]
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            self._inline(node, prefix, is_recorded)
        elif isinstance(node.target, torch._ops.OpOverload):
            self._operator(node, node.target, prefix, is_recorded)
        else:
            raise ExportError(
                f"{self._where(node)} computes with sizes or numbers that depend on data "
                f"({node.target}); make them constants of the forward"
            )

    def _inline(self, node: Node, prefix: str, is_recorded: bool) -> None:
        """``with torch.no_grad()``: its calls are not recorded."""
        if str(node.target) != "wrap_with_set_grad_enabled":
            raise ExportError(
                f"{self._where(node)} runs in {node.target}, which no device can run a part of; "
                "take the context (autocast, cond, checkpoint) out of the forward: precision is "
                "an option of the Trainer"
            )
        is_enabled, inner, *given = node.args
        body = self.named[inner]  # type: ignore[index]
        assert isinstance(body, GraphModule)
        holders = [n for n in body.graph.nodes if n.op == "placeholder"]
        for holder, argument in zip(holders, given, strict=True):
            self.named[holder] = self._resolved(argument)
        self.named[node] = self.read(
            body, prefix=f"{prefix}{node.name}.", is_recorded=is_recorded and bool(is_enabled)
        )

    def _operator(
        self, node: Node, target: torch._ops.OpOverload, prefix: str, is_recorded: bool
    ) -> None:
        if target._schema.name in _DROPPED:
            self.named[node] = None
            return
        made = [value for value in tensors_of(node.meta.get("val")) if isinstance(value, Tensor)]
        if not made:
            raise ExportError(
                f"{self._where(node)} takes a number out of a tensor ({target}), so what follows "
                "depends on data; keep it a tensor"
            )
        arguments = {
            parameter.name: value
            for parameter, value in zip(target._schema.arguments, node.args, strict=False)
        } | dict(node.kwargs)
        resolved = {name: self._resolved(value) for name, value in arguments.items()}
        name = f"{prefix}{node.name}"
        try:
            target, changed = self.in_place.out_of_place(target, resolved, self.sources)
        except ValueError as error:
            raise ExportError(f"{self._where(node)}: {error}") from error
        reads: list[str] = []
        given = {key: _with_operands(value, reads) for key, value in resolved.items()}
        is_tuple = not isinstance(node.meta["val"], Tensor)
        names = [f"{name}.{i}" for i in range(len(made))] if is_tuple else [name]
        self.named[node] = _like(node.meta["val"], iter(names))
        self.in_place.note(target, given, reads, names, changed)
        self.calls.append(OperatorCall(name, str(target), given, is_recorded))
        self.read_by[name] = tuple(reads)
        self.made_by[name] = tuple(zip(names, made, strict=True))
        self.modules[name] = _module_of(node)

    def _resolved(self, argument: Any) -> Any:
        """An argument with names in the place of nodes."""
        if isinstance(argument, Node):
            found = self.named[argument]
            return _named(found, self.in_place)
        if isinstance(argument, tuple | list):
            return [self._resolved(each) for each in argument]
        return argument

    def _where(self, node: Node) -> str:
        trace = str(node.meta.get("stack_trace") or "").strip().splitlines()
        line = next((x.strip() for x in reversed(trace) if x.strip().startswith("File")), "")
        place = f" ({line})" if line else ""
        return f"the forward of {type(self.module).__name__}, at {node.name!r}{place},"

    def results(
        self, program: torch.export.ExportedProgram
    ) -> tuple[list[str], list[tuple[str | None, Any]]]:
        """Names of the tensors that the forward returns, and every leaf of its result."""
        (node,) = [n for n in program.graph.nodes if n.op == "output"]
        leaves: list[tuple[str | None, Any]] = []
        for argument in node.args[0]:
            found = self._resolved(argument)
            leaves.append((found.value, None) if isinstance(found, _Name) else (None, found))
        return [name for name, _ in leaves if name is not None], leaves


@dataclass(frozen=True, slots=True)
class _Name:
    """The name of a value, told from texts that are arguments."""

    value: str


def _named(found: Any, in_place: InPlace) -> Any:
    if isinstance(found, str):
        return _Name(in_place.now(found))
    if isinstance(found, tuple | list):
        return [_named(each, in_place) for each in found]
    return found.value if isinstance(found, _Text) else found


@dataclass(frozen=True, slots=True)
class _Text:
    """A text that is an argument."""

    value: str


def _with_operands(argument: Any, reads: list[str]) -> Any:
    """An argument with operands in the place of names, which are added to ``reads``."""
    if isinstance(argument, _Name):
        reads.append(argument.value)
        return Operand(len(reads) - 1)
    if isinstance(argument, list):
        return [_with_operands(each, reads) for each in argument]
    return argument


def _like(value: Any, names: Iterator[str]) -> Any:
    """The next names in the form of what an operator returns."""
    if isinstance(value, Tensor):
        return next(names)
    if isinstance(value, tuple | list):
        return [_like(each, names) for each in value]
    return None


def _attribute(root: nn.Module, path: str) -> Any:
    found: Any = root
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _canonical_names(module: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer -> its first one."""
    first: dict[int, str] = {}
    found = {}
    for named in (module.named_parameters, module.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            found[name] = first.setdefault(id(tensor), name)
    return found


def _module_of(node: Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    return next((path for path, _ in reversed(stack.values())), "")


_DROPPED = frozenset(
    {
        "aten::_assert_tensor_metadata",
        "aten::_assert_async",
        "aten::_assert_scalar",
        "aten::sym_constrain_range_for_size",
    }
)
"""Checks that hold for the sizes of the export, and compute nothing."""
