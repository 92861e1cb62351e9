"""Gradients averaged over pipelines that train side by side."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn import Parameter

from lightning_gpp.runtime.processes.peers import Peers


def average_gradients(
    parameters: Iterable[Parameter], peers: Peers, *, is_asked_to_end: bool
) -> bool:
    """Peers: gradients become their mean over the pipelines.

    A parameter that has none in one pipeline counts there as one of zeros; one that has none
    anywhere still has none.

    Args:
        parameters: that the peers hold, in one order.
        peers: this rank in the other pipelines.
        is_asked_to_end: whether this pipeline is.

    Returns:
        Whether any pipeline is asked to end, which all know after this.

    Raises:
        NotImplementedError: a gradient is sparse.
    """
    held = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in held:
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise NotImplementedError(
                f"a gradient of shape {tuple(parameter.shape)} is sparse, which is not averaged "
                "over pipelines; use sparse=False in the embedding, or pipelines=1"
            )
    there = [float(parameter.grad is not None) for parameter in held]
    counts = torch.tensor([*there, float(is_asked_to_end)], dtype=torch.float64)
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in held]
    peers.mean_([counts, *gradients], "averaging gradients over the pipelines")
    *shares, ends = counts.tolist()
    for parameter, gradient, share in zip(held, gradients, shares, strict=True):
        if share:
            parameter.grad = gradient
    return bool(ends)
