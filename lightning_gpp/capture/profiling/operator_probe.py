"""Measures one operator: seconds, bytes kept for the backward, floating-point operations."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lightning_gpp.capture.model import CapturedModel
from lightning_gpp.capture.values.structure import map_tensors, tensors_of
from lightning_gpp.common.torch_device import synchronize
from lightning_gpp.cost import OpProfile
from lightning_gpp.graph import OpNode

MOST_REPEATS = 9
"""Measured runs of an operator whose times do not settle (a loaded machine)."""

STABLE_SPREAD = 0.2
"""Times have settled when their middle half lies within this part of their median."""

LEAST_PART = 0.1
"""Of the time of a backward at least this part is the operator's own."""

_logger = logging.getLogger(__name__)


class OperatorProbe:
    """Runs one operator on given values, as often as its times need to settle.

    Args:
        captured: the model.
        operator: the operator.
        device: where its values are.
        stage: what runs it as a :class:`~lightning_gpp.capture.StageModule` does; by default the
            operator on a whole micro-batch.

    Attributes:
        results: the values that it made in its last run.
    """

    def __init__(
        self, captured: CapturedModel, operator: OpNode, device: torch.device, stage: Any = None
    ) -> None:
        self.name, self.device = operator.name, device
        self.outputs = tuple(value.name for value in operator.outputs)
        self.stage = stage or captured.stage([operator.name], operator.inputs, self.outputs)
        self.training = captured.module.training
        self.parameters = list(map(captured.module.get_parameter, self.stage.parameter_names))
        self.results: dict[str, Any] = {}

    def measure(self, values: Mapping[str, Any], repeats: int, deadline_s: float) -> OpProfile:
        """Seconds of the operator; what :meth:`look` tells is not in the profile.

        The run that warms up leaves gradients of the parameters, to which the others add theirs, as
        every micro-batch but the first does: with small ones that is a good part of a backward.

        Args:
            values: value name -> value; has its inputs.
            repeats: least measured runs.
            deadline_s: on the monotonic clock; past it a single run has to do.
        """
        for parameter in self.parameters:
            parameter.grad = None  # rollback puts it back
        runs = [self._run(values)]
        if time.monotonic() < deadline_s:
            runs = [self._run(values)]  # the first one warmed up
        while len(runs) < repeats or (len(runs) < MOST_REPEATS and not _has_settled(runs)):
            if time.monotonic() > deadline_s:
                break
            runs.append(self._run(values))
        for parameter in self.parameters:
            parameter.grad = None  # those of all operators together are the whole model's
        return OpProfile(
            statistics.median(run.forward_s for run in runs),
            statistics.median(run.backward_s for run in runs),
        )

    def look(self, values: Mapping[str, Any]) -> OpProfile:
        """Runs the forward once, untimed; of the profile only bytes and operations are known.

        Args:
            values: value name -> value; has its inputs.
        """
        own = {_stored(parameter)[0] for parameter in self.parameters}
        saved: dict[Any, int] = {}

        def note(tensor: Tensor) -> Tensor:
            key, size_bytes = _stored(tensor)
            if key not in own:
                saved[key] = size_bytes
            return tensor.detach()  # an output that is saved would keep its own graph

        counter, flops = FlopCounterMode(display=False), 0.0
        hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
        try:
            with counter, hooks:
                self._forward(values)
            flops = float(counter.get_total_flops())
        except Exception as error:  # the counter looks into every call, and may not know one
            saved.clear()
            with hooks:
                self._forward(values)
            _logger.info("the flops of %s cannot be counted: %s", self.name, error)
        return OpProfile(0.0, activation_bytes=sum(saved.values()), forward_flops=flops)

    def _forward(self, values: Mapping[str, Any]) -> tuple[Sequence[Any], float]:
        """What the operator makes, and seconds; its results are kept without their graph."""
        inputs = map_tensors([values[name] for name in self.stage.inputs], _detached_copy)
        start_s = self._now_s()
        outputs = self.stage(inputs, training=self.training)
        forward_s = self._now_s() - start_s
        free = map_tensors(list(outputs), lambda t: t.detach().requires_grad_(t.requires_grad))
        self.results = dict(zip(self.outputs, free, strict=True))
        return outputs, forward_s

    def _run(self, values: Mapping[str, Any]) -> OpProfile:
        outputs, forward_s = self._forward(values)
        roots = [tensor for tensor in tensors_of(outputs) if tensor.requires_grad]
        if not roots:
            return OpProfile(forward_s)
        seeds = [torch.ones_like(root) for root in roots]
        start_s = self._now_s()
        try:
            torch.autograd.backward(roots, seeds)
        except RuntimeError as error:  # a gradient inside of the forward freed the graph
            if self.training:
                raise
            _logger.info("%s has no backward in evaluation mode: %s", self.name, error)
            return OpProfile(forward_s)
        taken_s = self._now_s() - start_s
        # A stage starts the engine once for all of its operators.
        own_s = max(taken_s - _engine_start_s(self.device), LEAST_PART * taken_s)
        return OpProfile(forward_s, own_s)

    def _now_s(self) -> float:
        synchronize(self.device)
        return time.perf_counter()


@cache
def _engine_start_s(device: torch.device) -> float:
    """Seconds of a backward through nothing but a view: what starting autograd's engine takes."""
    times_s = []
    for _ in range(20):
        leaf = torch.zeros(1, device=device, requires_grad=True)
        view, seed = leaf.view_as(leaf), torch.ones(1, device=device)
        synchronize(device)
        start_s = time.perf_counter()
        torch.autograd.backward([view], [seed])
        synchronize(device)
        times_s.append(time.perf_counter() - start_s)
    return min(times_s)


def _has_settled(runs: Sequence[OpProfile]) -> bool:
    """Whether the middle half of the times lies within a part of their median."""
    times_s = [run.forward_s + run.backward_s for run in runs]
    if len(times_s) < 2:
        return True
    low, median, high = statistics.quantiles(times_s, n=4, method="inclusive")
    return high - low <= STABLE_SPREAD * median


def _detached_copy(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone()
    # a view of a leaf, so that the operator may change it in place
    return copy.requires_grad_().view_as(copy) if tensor.requires_grad else copy


def _stored(tensor: Tensor) -> tuple[Any, int]:
    """What tells the memory of a tensor from others', and its bytes."""
    if tensor.layout is not torch.strided:
        return id(tensor), tensor.numel() * tensor.element_size()
    storage = tensor.untyped_storage()
    return storage._cdata, storage.nbytes()
