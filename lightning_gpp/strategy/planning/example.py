"""The micro-batch with which a model is captured and measured, from a call of its forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpp.capture.checks.check import unchanged_parameters
from lightning_gpp.capture.checks.rollback import rollback
from lightning_gpp.capture.values.arguments import Arguments
from lightning_gpp.capture.values.placed import HostWeights
from lightning_gpp.capture.values.samples import Sample, first_sample
from lightning_gpp.capture.values.structure import leaves_of
from lightning_gpp.runtime.pieces import Slices
from lightning_gpp.strategy.cutting.graphs import graph_slices
from lightning_gpp.strategy.planning.planning import Example


def example_of(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    unit_sizes: Callable[[int], Sequence[int]],
) -> Example:
    """The first samples of a call, as many as a micro-batch is likely to have.

    All of them where the arguments do not agree on what a sample is, as those of a graph, or where
    the forward does not take some of their rows, as where samples are columns.

    Args:
        module: whose forward is called.
        args: of the call.
        kwargs: likewise, by name.
        unit_sizes: samples of each micro-batch for a number of samples.

    Raises:
        CaptureError: an argument is a list with an entry of its own for every sample, or the
            forward changes a parameter.
    """
    with torch.inference_mode(False):
        arguments = Arguments.of(module, args, kwargs)
        tensors = arguments.tensors(args, kwargs)
        arguments.refuse_lists_of_samples(tensors)
        sample = first_sample(tensors)
        total = max(1, sample.num_samples)
        units = unit_sizes(total)
        slices = _slices(sample, [units[0], total - units[0]] if len(units) > 1 else [total])
        cut = arguments.rebuild(_firsts(tensors, slices or {}))
        if slices is not None and (len(units) == 1 or _runs(module, *cut)):
            return Example(*cut, total, len(units))
        return Example(*arguments.rebuild(_firsts(tensors, {})), None, 1)


def _firsts(tensors: Mapping[str, Tensor], slices: Mapping[str, Slices]) -> dict[str, Tensor]:
    """The first part of every tensor, all of it where it is not cut; apart from autograd."""
    return {
        name: slices.get(name, Slices(None))
        .cut(tensor.detach(), 1)[0]
        .clone()
        .requires_grad_(tensor.requires_grad)
        for name, tensor in tensors.items()
    }


def _runs(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the forward takes these arguments; it leaves no trace.

    Raises:
        CaptureError: it changes a parameter.
    """
    tensors = (leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor))
    weights = HostWeights(module, next(tensors).device)
    with (
        rollback(module),
        torch.no_grad(),
        weights.resident(),
        unchanged_parameters(module, weights.changed),
        weights.visiting(),
    ):
        try:
            module.forward(*args, **kwargs)
        except Exception:  # capture shows it if the whole call fails likewise
            return False
    return True


def _slices(sample: Sample, sizes: Sequence[int]) -> Mapping[str, Slices] | None:
    """How the first samples are cut off; None where they cannot be."""
    tensors, total = sample.tensors, sample.num_samples
    if len(sizes) == 1:
        return dict.fromkeys(tensors, Slices(None))
    if sample.graphs is not None:
        return graph_slices(tensors, sizes)
    if not _agree(tensors, total):
        return None
    return {
        name: Slices.of_samples(0, len(tensor) // total, sizes)
        if tensor.dim() and len(tensor)
        else Slices(None)
        for name, tensor in tensors.items()
    }


def _agree(tensors: Mapping[str, Tensor], total: int) -> bool:
    """Whether the first dimension of every tensor goes with the samples."""
    return all(
        tensor.layout is torch.strided and len(tensor) % total == 0
        for tensor in tensors.values()
        if tensor.dim()
    )
