"""Measures what the operators of a captured model cost, at several micro-batch sizes."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_gpp.capture.checks.rollback import rollback
from lightning_gpp.capture.model import CapturedModel
from lightning_gpp.capture.profiling.operator_probe import OperatorProbe
from lightning_gpp.capture.profiling.shared_work import SharedWork
from lightning_gpp.capture.values.samples import Sample, first_sample, resized
from lightning_gpp.cost import Costs, Profile

DEFAULT_BUDGET_S = 60.0
"""Seconds after which an operator runs once and no further micro-batch size begins."""

NUM_SIZES = 3
"""Micro-batch sizes that are measured: enough to see whether a line fits."""

REPEATS = 3
"""Measured runs of an operator, at least."""

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
    Operators that do the same work share the repeats (:mod:`.shared_work`): at most ``repeats`` of
    them are timed, and the median of theirs is what all of them cost. When all sizes are done, each
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
    size = sample.num_samples
    device = next(iter(tensors.values())).device
    deadline_s = time.monotonic() + budget_s
    probes = [OperatorProbe(captured, operator, device) for operator in captured.graph]
    work = SharedWork(captured, probes, device, deadline_s)
    profiles: list[Profile] = []
    with rollback(captured.module), torch.inference_mode(False), torch.enable_grad():
        for other in _sizes(captured, sample, num_sizes):
            inputs = tensors if other == size else resized(tensors, captured.graph, other / size)
            try:
                profiles.append(work.profile(inputs, other, repeats))
            except Exception as error:  # the model itself may not take another size
                if not profiles:
                    raise
                _logger.info("the model does not run on %d samples: %s", other, error)
                continue
            if time.monotonic() > deadline_s:
                _logger.warning(
                    "profiling took more than its %.0f s: %d of %d micro-batch sizes were "
                    "measured, some operators once only; the plan may be a little worse",
                    *(budget_s, len(profiles), num_sizes),
                )
                break
        for place, first in enumerate(profiles):
            if time.monotonic() > deadline_s:
                break
            other = round(first.microbatch_size)
            inputs = tensors if other == size else resized(tensors, captured.graph, other / size)
            profiles[place] = _quicker(first, work.profile(inputs, other, 1))
    return Costs(tuple(profiles))


def profile_probes(
    captured: CapturedModel,
    probes: Sequence[OperatorProbe],
    tensors: Mapping[str, Tensor],
    size: float,
) -> Profile:
    """Measures operators as :func:`profile_costs` does, by probes of another's making.

    Args:
        captured: the model, in the mode that its module is in.
        probes: of the operators, in order.
        tensors: the inputs of the model.
        size: samples that they stand for.
    """
    device = next(iter(tensors.values())).device
    work = SharedWork(captured, probes, device, time.monotonic() + DEFAULT_BUDGET_S)
    with rollback(captured.module), torch.inference_mode(False), torch.enable_grad():
        return _quicker(*(work.profile(tensors, size, count) for count in (REPEATS, 1)))


def _sizes(captured: CapturedModel, sample: Sample, count: int) -> list[int]:
    """Micro-batch sizes to measure, the given one first."""
    size = sample.num_samples
    inputs = [spec for item in captured.graph.inputs for spec in item.value.tensors]
    if captured.takes_graphs:
        assert sample.graphs is not None
        return [size, 2 * size][:count] if sample.graphs.is_batch else [size]
    if not any(spec.batch_dim is not None for spec in inputs):
        return [size]
    smaller = [size // part for part in (2, 4) if not size % part]
    larger = [size * part for part in (2, 4)]
    return [size, *smaller, *larger][:count] if count > 1 else [size]


def _quicker(one: Profile, other: Profile) -> Profile:
    """Two measurements of the same as one: every operator as it was quicker."""
    operators = {
        name: min(cost, other.operators[name], key=lambda each: each.forward_s + each.backward_s)
        for name, cost in one.operators.items()
    }
    return replace(one, operators=operators)
