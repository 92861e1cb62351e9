"""Measures the operators of a model in turn, those that do the same work once for all.

Measured one by one, equal layers seem to differ by what the machine did meanwhile, and a planner
would cut where the differences tell it to. Every operator runs once, forward and untimed, since
what a module computes is not all in its text and its plain attributes: operators that make the same
calls, but keep other numbers of bytes or need other numbers of floating-point operations, do not do
the same work. Of those that do, the first few are timed. At other micro-batch sizes the rest do not
run at all: values of the same shapes stand in for theirs.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_gpp.capture.model import CapturedModel
from lightning_gpp.capture.operators.fingerprint import constant_text
from lightning_gpp.capture.operators.normalize import function_name
from lightning_gpp.capture.profiling.operator_probe import OperatorProbe
from lightning_gpp.capture.values.placed import on_device
from lightning_gpp.capture.values.structure import leaves_of
from lightning_gpp.common.torch_device import device_name
from lightning_gpp.cost import OpProfile, Profile
from lightning_gpp.graph import OpNode

_Timed = list[tuple[OpProfile, list[Any]]]
"""The costs of operators that do the same work, and the values that they made."""


class SharedWork:
    """Measures operators as often as it is asked to.

    Args:
        captured: the model.
        probes: of its operators, in the order in which they run.
        device: which is measured.
        deadline_s: on the monotonic clock; past it an operator runs once.
    """

    def __init__(
        self,
        captured: CapturedModel,
        probes: Sequence[OperatorProbe],
        device: torch.device,
        deadline_s: float,
    ) -> None:
        self._probes, self._deadline_s = probes, deadline_s
        self._module, self._device = captured.module, device
        operators = captured.graph.operator
        self._works = {each.name: work_of(operators[each.name], captured) for each in probes}
        self._num_alike = Counter(self._works.values())
        # by the name of an operator: equal for those that do the same work, found when they ran
        self._groups: dict[str, Hashable] = {}

    def profile(self, tensors: Mapping[str, Tensor], size: float, repeats: int) -> Profile:
        """The costs of every operator; those that do the same work have the same.

        Args:
            tensors: the inputs of the model.
            size: samples that they stand for.
            repeats: least measured runs of an operator, which those that do the same work share.
        """
        values: dict[str, Any] = {}
        for name, tensor in tensors.items():
            values[name] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        timed: dict[Hashable, _Timed] = {}
        for probe in self._probes:
            read = map(self._module.get_parameter, probe.stage.parameter_names)
            buffers = map(self._module.get_buffer, probe.stage.buffer_names)
            with on_device([*read, *buffers], self._device):
                results = self._run(probe, values, timed, repeats)
            values |= zip(probe.outputs, results, strict=True)
        found = {group: _middle([cost for cost, _ in timed[group]]) for group in timed}
        costs = {probe.name: found[self._groups[probe.name]] for probe in self._probes}
        return Profile(costs, float(size), device_name(self._device))

    def _run(
        self,
        probe: OperatorProbe,
        values: Mapping[str, Any],
        timed: dict[Hashable, _Timed],
        repeats: int,
    ) -> Sequence[Any]:
        """Times an operator, or not; returns the values that it makes."""
        group = self._groups.get(probe.name)
        members = timed.get(group, [])
        is_timed = len(members) < repeats
        if members and not is_timed and all(map(_may_stand_in, leaves_of(members[0][1]))):
            return members[0][1]
        seen = members[0][0] if members and is_timed else probe.look(values)
        if group is None:
            group = self._groups[probe.name] = self._group_of(probe, values, seen)
        members = timed.setdefault(group, [])
        if len(members) < repeats:
            least = math.ceil(repeats / self._num_alike[self._works[probe.name]])
            cost = probe.measure(values, least, self._deadline_s)
            cost = replace(seen, forward_s=cost.forward_s, backward_s=cost.backward_s)
            members.append((cost, list(probe.results.values())))
        return list(probe.results.values())

    def _group_of(
        self, probe: OperatorProbe, values: Mapping[str, Any], seen: OpProfile
    ) -> Hashable:
        """Equal for operators that do the same work, on values of the same forms."""
        read = [values[name] for name in probe.stage.inputs]
        forms = tuple(map(_form, leaves_of([read, list(probe.results.values())])))
        return self._works[probe.name], seen.activation_bytes, seen.forward_flops, forms


def _form(leaf: Any) -> Hashable:
    if not isinstance(leaf, Tensor):
        return type(leaf).__qualname__
    return leaf.shape, leaf.dtype, leaf.layout, leaf.requires_grad


def _may_stand_in(leaf: Any) -> bool:
    """Whether a value of another operator does: numbers may be indices, and more than values."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.layout is torch.strided


def _middle(costs: Sequence[OpProfile]) -> OpProfile:
    """The costs of operators that do the same work: the median of theirs."""
    return replace(
        costs[0],
        forward_s=statistics.median(each.forward_s for each in costs),
        backward_s=statistics.median(each.backward_s for each in costs),
    )


def work_of(operator: OpNode, captured: CapturedModel) -> Hashable:
    """Equal for operators that do the same work.

    They make the same calls with the same settings, on inputs and parameters of the same shapes.
    """
    graph, module = captured.graph, captured.module
    given = {item.value.name: item.requires_grad for item in graph.inputs}
    read = tuple((graph.values[name].tensors, given.get(name)) for name in operator.inputs)
    parameters = [module.get_parameter(name) for name in operator.parameters]
    held = tuple((tuple(p.shape), str(p.dtype), p.requires_grad) for p in parameters)
    numbers: dict[str, int] = {}

    def numbered(match: re.Match[str]) -> str:
        return f"%{numbers.setdefault(match[0], len(numbers))}"

    calls = [
        f"{_called(node, captured)} %{node.name} {constant_text([node.args, node.kwargs])}"
        for node in captured.nodes(operator.name)
    ]
    return re.sub(r"%\w+", numbered, "\n".join(calls)), read, held


def _called(node: fx.Node, captured: CapturedModel) -> str:
    if node.op == "call_module":
        module = captured.module.get_submodule(str(node.target))
        return f"{type(module).__module__} {module!r} {[*map(_settings, module.modules())]}"
    return f"{node.op} {function_name(node)}"


def _settings(module: nn.Module) -> list[tuple[str, object]]:
    """Plain attributes of a module: not all of them are in its text (numbers of heads)."""
    plain = (bool, int, float, str, tuple, type(None))
    return [(name, value) for name, value in vars(module).items() if isinstance(value, plain)]
