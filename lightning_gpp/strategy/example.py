"""The micro-batch with which a model is captured and measured, from a call of its forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpp.capture.arguments import Arguments
from lightning_gpp.capture.placed import placed
from lightning_gpp.capture.rollback import rollback
from lightning_gpp.capture.samples import first_sample
from lightning_gpp.capture.structure import flatten
from lightning_gpp.strategy.planning import Example


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
    """
    with torch.inference_mode(False):
        tensors = Arguments.of(module, args, kwargs).tensors(args, kwargs)
        sample = first_sample(tensors)
        total = sample.num_samples
        is_cut = sample.graphs is None and total > 0 and _agree(tensors, total)
        units = unit_sizes(total) if is_cut else [total]
        leaves, structure = flatten((tuple(args), dict(kwargs)))
        few = [
            _first(leaf, units[0], total) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        ]
        cut_args, cut_kwargs = structure.unflatten(few)
        if len(units) > 1 and not _runs(module, cut_args, cut_kwargs):
            is_cut, units = False, [total]
            whole = [_first(t, total, total) if isinstance(t, Tensor) else t for t in leaves]
            cut_args, cut_kwargs = structure.unflatten(whole)
    return Example(cut_args, cut_kwargs, total if is_cut else None, len(units))


def _agree(tensors: Mapping[str, Tensor], total: int) -> bool:
    """Whether the first dimension of every tensor goes with the samples."""
    return all(
        tensor.layout is torch.strided and len(tensor) % total == 0
        for tensor in tensors.values()
        if tensor.dim()
    )


def _runs(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the forward takes these arguments; it leaves no trace."""
    home = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    args, kwargs = placed((tuple(args), dict(kwargs)), home)
    with rollback(module), torch.no_grad():
        try:
            module.forward(*args, **kwargs)
        except Exception:  # capture shows it if the whole call fails likewise
            return False
    return True


def _first(tensor: Tensor, num_samples: int, total: int) -> Tensor:
    """The part of a tensor that belongs to the first samples, cut off from autograd."""
    if num_samples != total and tensor.dim():
        part = tensor.detach()[: len(tensor) * num_samples // total].clone()
    else:
        part = tensor.detach().clone()
    return part.requires_grad_(tensor.requires_grad)
