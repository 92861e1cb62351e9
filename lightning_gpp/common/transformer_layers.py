"""Replacements for torch's transformer modules that tracers can follow.

In evaluation they go by a fast path, whose operators tracers do not know, and they look into a mask
to find out whether it is causal; both is faster only. One thing is not: without gradients, and if
the padding of every sample of a batch is at its end, ``nn.TransformerEncoder`` goes over to nested
tensors, which leave padding away, and fills it with zeros after its last layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import transformer

from lightning_gpp.common.instance_attribute import replaced

Fill = Callable[[Tensor, Tensor, bool], Tensor]
"""From the output of an encoder's layers, its mask of padding, and whether they are in training."""


@contextmanager
def step_by_step(fill: Fill) -> Iterator[None]:
    """Torch's transformer modules compute by single operators, the same for every batch.

    Args:
        fill: is called where padding may have to be filled with zeros.
    """
    encode: Any = nn.TransformerEncoder.forward
    is_fast = torch.backends.mha.get_fastpath_enabled()

    def forward(
        encoder: nn.TransformerEncoder,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        layers = SimpleNamespace(layers=encoder.layers, norm=None, use_nested_tensor=False)
        output: Tensor = encode(layers, src, mask, src_key_padding_mask, is_causal)
        is_nested = is_fast and encoder.use_nested_tensor and mask is None and src.dim() == 3
        if is_nested and src_key_padding_mask is not None and not torch.is_autocast_enabled():
            first: Any = encoder.layers[0]
            output = fill(output, src_key_padding_mask, first.training)
        return output if encoder.norm is None else encoder.norm(output)

    detected: Any = lambda mask, is_causal=None, size=None: is_causal is True  # noqa: E731
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with replaced(
            [
                (nn.TransformerEncoder, "forward", forward),
                (transformer, "_detect_is_causal_mask", detected),
            ]
        ):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fast)


def is_at_end(padding: Tensor) -> Tensor:
    """Whether the padding of every sample is at its end.

    Args:
        padding: mask of it; anything but False or 0 is padding.

    >>> is_at_end(torch.tensor([[False, True, True], [False, False, True]])).item()
    True
    >>> is_at_end(torch.tensor([[True, False, True], [False, False, True]])).item()
    False
    """
    is_padding = padding.bool()
    return (is_padding[:, :-1] <= is_padding[:, 1:]).all()


def zero_padding(output: Tensor, padding: Tensor) -> Tensor:
    """The output with zeros in the place of padding, if that is at the end of every sample."""
    return output.masked_fill(padding.bool().unsqueeze(-1) & is_at_end(padding), 0)
