"""Measures the costs of a captured model's operators at several micro-batch sizes.

Operators are measured in turn, those that do the same work once for all. Measured one by one, equal
layers seem to differ by what the machine did meanwhile, and a planner would cut where the
differences tell it to. Every operator runs once, forward and untimed, since what a module computes
is not all in its settings: operators that make the same calls, but keep other numbers of bytes or
need other numbers of floating-point operations, do not do the same work. Of those that do, the
first is timed. At other micro-batch sizes the rest do not run at all: values of the same shapes
stand in for theirs.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import FlopCounterMode

from lightning_gpp.capture.checks.rollback import rollback
from lightning_gpp.capture.model import CapturedModel
from lightning_gpp.capture.operators.fingerprint import constant_text, module_content
from lightning_gpp.capture.operators.observe import function_name
from lightning_gpp.capture.tracing.trace import guard
from lightning_gpp.capture.values.placed import on_device
from lightning_gpp.capture.values.samples import Sample, first_sample
from lightning_gpp.capture.values.structure import leaves_of, map_tensors, tensors_of
from lightning_gpp.common.tensor_places import memory_of
from lightning_gpp.common.torch_device import device_name, synchronize
from lightning_gpp.cost import Costs, OpProfile, Profile
from lightning_gpp.graph import OpNode

DEFAULT_BUDGET_S = 60.0
"""Seconds after which an operator runs once and no further micro-batch size begins."""

NUM_SIZES = 3
"""Micro-batch sizes that are measured: enough to see whether a line fits."""

REPEATS = 3
"""Measured runs of an operator, at least."""

MOST_REPEATS = 9
"""Measured runs of an operator whose times do not settle (a loaded machine)."""

STABLE_SPREAD = 0.2
"""Times have settled when their middle half lies within this part of their median."""

LEAST_PART = 0.1
"""Of the time of a backward at least this part is the operator's own."""

_logger = logging.getLogger(__name__)


def profile_costs(
    captured: CapturedModel,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    repeats: int = REPEATS,
    num_sizes: int = NUM_SIZES,
    budget_s: float = DEFAULT_BUDGET_S,
) -> Costs:
    """Runs the operators one by one, for micro-batches of several sizes, and measures them.

    The sizes are that of the given micro-batch, its half and its quarter; where it has too few
    samples, its double and fourfold (samples repeated); of a batch of graphs it and
    its double. A model that takes one size only is measured at that.

    Each operator runs once to warm up and ``repeats`` times more, on detached inputs, and on (up to
    nine times) until the middle half of its times lies within 20 % of their median, which counts.
    Of operators that do the same work the first is timed. When all sizes are done, each
    is measured again, since what else ran on the machine may have slowed many operators of one; the
    quicker time counts.
    Saved activations are counted by storage, parameters left out; floating-point operations by
    torch's counter, which knows matrix products and convolutions, not look-ups. The bytes of
    parameters and outputs are in the graph. The module is left as it was.

    Args:
        captured: in the mode (train or eval) that its module is in.
        args: one micro-batch, on the device that is measured; parameters elsewhere visit it.
        kwargs: its keyword arguments.
        repeats: least measured runs per operator.
        num_sizes: most sizes to measure.
        budget_s: seconds after which an operator runs once and no further size begins.
    """
    tensors = captured.inputs(args, kwargs or {})
    sample = first_sample(tensors)
    deadline_s = time.monotonic() + budget_s
    probes = [OperatorProbe(captured, operator, sample.device) for operator in captured.graph]
    work = _SharedWork(probes, deadline_s)
    found: list[tuple[Sample, Profile]] = []
    with rollback(captured.module), torch.inference_mode(False), torch.enable_grad():
        for each in _samples(captured, sample, num_sizes):
            try:
                found.append((each, work.profile(each, repeats)))
            except Exception as error:  # the model itself may not take another size
                if not found:
                    raise
                _logger.info("the model does not run on %d samples: %s", each.num_samples, error)
                continue
            if time.monotonic() > deadline_s:
                _logger.warning(
                    "measuring the model took longer than %.0f s and was cut short: %d of %d "
                    "micro-batch sizes were measured. The plan may be slightly worse",
                    *(budget_s, len(found), num_sizes),
                )
                break
        profiles = [
            _quicker(first, work.profile(each, 1)) if time.monotonic() <= deadline_s else first
            for each, first in found
        ]
    return Costs(tuple(profiles))


def profile_probes(
    probes: Sequence[OperatorProbe], tensors: Mapping[str, Tensor], size: int
) -> Profile:
    """Measures operators as :func:`profile_costs` does, by probes of another's making.

    Args:
        probes: of all operators, in order, in the mode that the module is in.
        tensors: the inputs of the model.
        size: samples that they stand for.
    """
    work = _SharedWork(probes, time.monotonic() + DEFAULT_BUDGET_S)
    with rollback(probes[0].captured.module), torch.inference_mode(False), torch.enable_grad():
        return _quicker(*(work.profile(Sample(tensors, size), count) for count in (REPEATS, 1)))


def _samples(captured: CapturedModel, sample: Sample, count: int) -> list[Sample]:
    """Inputs of the micro-batch sizes to measure, the given one first."""
    size, inputs = sample.num_samples, captured.graph.inputs
    if sample.graphs is not None:
        return [sample, sample.twice()][:count] if sample.graphs.is_batch else [sample]
    if not any(s.batch_dim is not None for item in inputs for s in item.value.tensors):
        return [sample]
    sizes = [*(size // part for part in (2, 4) if not size % part), 2 * size, 4 * size]
    return [sample, *(sample.sized(other) for other in sizes[: max(count, 1) - 1])]


def _quicker(one: Profile, other: Profile) -> Profile:
    """Two measurements of the same as one: every operator as it was quicker."""
    operators = {
        name: min(cost, other.operators[name], key=lambda each: each.forward_s + each.backward_s)
        for name, cost in one.operators.items()
    }
    return replace(one, operators=operators)


class _SharedWork:
    """Measures operators as often as it is asked to; those that do the same work once for all.

    Args:
        probes: of all operators of a model, in the order in which they run.
        deadline_s: on the monotonic clock; past it an operator runs once.
    """

    def __init__(self, probes: Sequence[OperatorProbe], deadline_s: float) -> None:
        self._probes, self._deadline_s = probes, deadline_s
        self._works = {each.name: work_of(each.operator, each.captured) for each in probes}
        # by the name of an operator: equal for those that do the same work, found when they ran
        self._groups: dict[str, Hashable] = {}

    def profile(self, sample: Sample, repeats: int) -> Profile:
        """The costs of every operator; those that do the same work have the same.

        Args:
            sample: the inputs of the model.
            repeats: least measured runs of an operator.
        """
        values: dict[str, Any] = {**sample.fresh()}
        timed: dict[Hashable, tuple[OpProfile, Sequence[Any]]] = {}
        for probe in self._probes:
            results = timed.get(self._groups.get(probe.name), (None, [None]))[1]
            if not all(map(_may_stand_in, leaves_of(results))):
                buffers = map(probe.captured.module.get_buffer, probe.stage.buffer_names)
                with on_device([*probe.parameters, *buffers], probe.device):
                    results = self._run(probe, values, timed, repeats)
            values |= zip(probe.outputs, results, strict=True)
        costs = {probe.name: timed[self._groups[probe.name]][0] for probe in self._probes}
        return Profile(costs, float(sample.num_samples), device_name(sample.device))

    def _run(
        self,
        probe: OperatorProbe,
        values: Mapping[str, Any],
        timed: dict[Hashable, tuple[OpProfile, Sequence[Any]]],
        repeats: int,
    ) -> Sequence[Any]:
        """Times an operator that is the first of its group; returns the values that it makes."""
        seen = probe.look(values)
        read = [values[name] for name in probe.stage.inputs]
        forms = tuple(map(_form, leaves_of([read, *probe.results.values()])))
        works = self._works[probe.name], seen.activation_bytes, seen.forward_flops, forms
        group = self._groups.setdefault(probe.name, works)
        if group not in timed:
            cost = probe.measure(values, seen, repeats, self._deadline_s)
            timed[group] = cost, list(probe.results.values())
        return list(probe.results.values())


def _form(leaf: Any) -> Hashable:
    if not isinstance(leaf, Tensor):
        return type(leaf).__qualname__
    return leaf.shape, leaf.dtype, leaf.layout, leaf.requires_grad


def _may_stand_in(leaf: Any) -> bool:
    """Whether a value of another operator does: numbers may be indices, and more than values."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.layout is torch.strided


def work_of(operator: OpNode, captured: CapturedModel) -> Hashable:
    """Equal for operators that make the same calls with the same settings."""
    parameters = [captured.module.get_parameter(name) for name in operator.parameters]
    held = tuple((tuple(p.shape), str(p.dtype), p.requires_grad) for p in parameters)
    calls, numbers = list[str](), dict[fx.Node, int]()

    def numbered(node: fx.Node) -> str:
        return f"%{numbers.setdefault(node, len(numbers))}"

    for node in captured.nodes(operator.name):
        called = function_name(node)
        if node.op == "call_module":
            called = module_content(captured.module.get_submodule(str(node.target)))
        args = node.args[:-1] if node.target is guard else node.args  # without whose decision it is
        given = fx.node.map_arg([node, args, node.kwargs], numbered)
        calls.append(f"{called} {constant_text(given)}")
    return tuple(calls), held


# One operator ------------------------------------------------------------------------------------


class OperatorProbe:
    """Runs one operator on given values until its times settle.

    Args:
        captured: the captured model.
        operator: name of the operator.
        device: where its values are.
        stage: with it alone; by default as the model has it.
        run: calls the stage with values; by default on a whole micro-batch.

    Attributes:
        results: the values that it made in its last run.
    """

    def __init__(
        self,
        captured: CapturedModel,
        operator: OpNode,
        device: torch.device,
        stage: Any = None,
        run: Callable[..., Sequence[Any]] | None = None,
    ) -> None:
        self.captured, self.operator, self.device = captured, operator, device
        self.name, self.training = operator.name, captured.module.training
        self.outputs = tuple(value.name for value in operator.outputs)
        self.stage = stage or captured.stage([operator.name], operator.inputs, self.outputs)
        self._call = run or self.stage
        self.parameters = list(map(captured.module.get_parameter, self.stage.parameter_names))
        self.results: dict[str, Any] = {}

    def measure(
        self, values: Mapping[str, Any], seen: OpProfile, repeats: int, deadline_s: float
    ) -> OpProfile:
        """The result of :meth:`look`, with the seconds of the operator.

        The run that warms up leaves gradients of the parameters, to which the others add theirs, as
        every micro-batch but the first does: with small ones that is a good part of a backward.

        Args:
            values: value name -> value; has its inputs.
            seen: what was told.
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
        forward_s = statistics.median(run.forward_s for run in runs)
        backward_s = statistics.median(run.backward_s for run in runs)
        return replace(seen, forward_s=forward_s, backward_s=backward_s)

    def look(self, values: Mapping[str, Any]) -> OpProfile:
        """Runs the forward once, untimed; of the profile only bytes and operations are known.

        Args:
            values: value name -> value; has its inputs.
        """
        own = set(map(memory_of, self.parameters))
        saved: dict[Any, int] = {}

        def note(tensor: Tensor) -> Tensor:
            if (memory := memory_of(tensor)) not in own:
                is_plain = tensor.layout is torch.strided
                size_bytes = tensor.numel() * tensor.element_size()
                saved[memory] = tensor.untyped_storage().nbytes() if is_plain else size_bytes
            return tensor.detach()  # an output that is saved would keep its own graph

        counter, flops = FlopCounterMode(display=False), 0.0
        hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
        for watches in ((counter, hooks), (hooks,), ()):
            saved.clear()
            try:
                with ExitStack() as stack:
                    for watch in watches:
                        stack.enter_context(watch)
                    self._forward(values)
                break
            except Exception as error:  # some calls take no counter, and torch.func.grad no hooks
                if not watches:
                    raise
                _logger.info("operations and memory of %s are not counted: %s", self.name, error)
        if counter in watches:
            flops = float(counter.get_total_flops())
        if not watches:
            for tensor in tensors_of(self.results):
                note(tensor)
        return OpProfile(0.0, activation_bytes=sum(saved.values()), forward_flops=flops)

    def _forward(self, values: Mapping[str, Any]) -> tuple[Sequence[Any], float]:
        """What the operator makes, and seconds; its results are kept without their graph."""
        inputs = map_tensors([values[name] for name in self.stage.inputs], _detached_copy)
        start_s = self._now_s()
        outputs = self._call(inputs, training=self.training)
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
