"""Measures the operators of a model in turn, those that do the same work once for all.

Every operator runs once, forward and untimed, since what a module computes is not all in its text
and its plain attributes: operators that make the same calls (:mod:`.alike`), but keep other numbers
of bytes or need other numbers of floating-point operations, do not do the same work. Of those that
do, the first few are timed. At other micro-batch sizes the rest do not run at all: values of the
same shapes stand in for theirs.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_gpp.capture.model import CapturedModel
from lightning_gpp.capture.profiling.alike import work_of
from lightning_gpp.capture.profiling.operator_probe import OperatorProbe
from lightning_gpp.capture.values.placed import on_device, tensor_at
from lightning_gpp.capture.values.structure import leaves_of
from lightning_gpp.cost import OpProfile


@dataclass(frozen=True, slots=True)
class _TimedOperator:
    """An operator of a group that was timed: its costs, and the values that it made."""

    cost: OpProfile
    results: Sequence[Any]


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

    def measured(self, tensors: Mapping[str, Tensor], repeats: int) -> dict[str, OpProfile]:
        """The costs of every operator; those that do the same work have the same.

        Args:
            tensors: the inputs of the model.
            repeats: least measured runs of an operator, which those that do the same work share.
        """
        values: dict[str, Any] = {}
        for name, tensor in tensors.items():
            values[name] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        timed: dict[Hashable, list[_TimedOperator]] = {}
        for probe in self._probes:
            names = (*probe.stage.parameter_names, *probe.stage.buffer_names)
            with on_device([tensor_at(self._module, n) for n in names], self._device):
                results = self._run(probe, values, timed, repeats)
            values |= zip(probe.outputs, results, strict=True)
        found = {group: _middle([each.cost for each in timed[group]]) for group in timed}
        return {probe.name: found[self._groups[probe.name]] for probe in self._probes}

    def _run(
        self,
        probe: OperatorProbe,
        values: Mapping[str, Any],
        timed: dict[Hashable, list[_TimedOperator]],
        repeats: int,
    ) -> Sequence[Any]:
        """Times an operator, or not; returns the values that it makes."""
        group = self._groups.get(probe.name)
        members = timed.get(group, [])
        is_timed = len(members) < repeats
        if members and not is_timed and all(map(_may_stand_in, leaves_of(members[0].results))):
            return members[0].results
        seen = members[0].cost if members and is_timed else probe.look(values)
        if group is None:
            group = self._groups[probe.name] = self._group_of(probe, values, seen)
        members = timed.setdefault(group, [])
        if len(members) < repeats:
            least = math.ceil(repeats / self._num_alike[self._works[probe.name]])
            cost = probe.measure(values, least, self._deadline_s)
            cost = replace(seen, forward_s=cost.forward_s, backward_s=cost.backward_s)
            members.append(_TimedOperator(cost, list(probe.results.values())))
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
