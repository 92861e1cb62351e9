"""Whether a forward treats many samples as it treats the few that were tried.

A decision by the number of samples (``if len(x) > 8``) and a number that is made of it
(``len(x) // 16``) may be others for a whole batch. Both are computed again without any tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from lightning_gpp.capture.errors import GuardError
from lightning_gpp.capture.model import CapturedModel
from lightning_gpp.capture.operators.observe import observation
from lightning_gpp.capture.operators.variation import tells_shape
from lightning_gpp.capture.tracing.trace import run_call


def unlike_tried(
    captured: CapturedModel, tried: tuple[int, int], taken: Sequence[int]
) -> str | None:
    """Where sizes make another forward of batches that run than of those that were tried.

    What grows in a straight line with the number of samples, trials show.

    Args:
        captured: the forward, of tensors that have samples in a dimension.
        tried: two different numbers of samples.
        taken: those that run.
    """
    try:
        first, second, *others = (_numbers(captured, count) for count in (*tried, *taken))
    except GuardError as error:
        return str(error)
    for count, numbers in zip(taken, others):
        share = (count - tried[0]) / (tried[1] - tried[0])
        for node, number in numbers.items():
            expected = first[node] + share * (second[node] - first[node])
            if not math.isclose(number, expected, abs_tol=1e-9):
                return f"{node.meta['location']} computes with another number for {count} samples"
    return None


def _numbers(captured: CapturedModel, count: int) -> Mapping[fx.Node, float]:
    """The numbers of sizes that tensors are computed with, if there are so many samples.

    Raises:
        GuardError: a decision comes out differently.
    """
    known, values = captured.verified, dict[fx.Node, Any]()

    def value(node: fx.Node) -> Any:
        if node in values:
            return values[node]
        (shape, *_), (dim, *_) = observation(node).shapes, known.cuts.batch_dims[node.name]
        sizes = [n * count // known.num_samples if d == dim else n for d, n in enumerate(shape)]
        return torch.empty(sizes, device="meta")

    for node in captured.all_nodes(training=captured.module.training):
        reads, of_shape = node.all_input_nodes, tells_shape(node)
        is_known = all(r in values or (of_shape and observation(r).is_tensor) for r in reads)
        if reads and is_known and not observation(node).has_tensors:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
            values[node] = run_call(node.op, node.target, *args, **kwargs)
    numbers = {node: each for node, each in values.items() if isinstance(each, int | float)}
    return {n: x for n, x in numbers.items() if any(observation(u).has_tensors for u in n.users)}
