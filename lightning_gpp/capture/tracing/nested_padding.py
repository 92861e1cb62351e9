"""``nn.TransformerEncoder`` without gradients: padded positions come out as zeros.

With a padding mask, in eval mode and without gradients, torch's encoder goes over to nested
tensors, which leave padding away, and fills it with zeros after its last layer. With gradients
padded positions are computed like others. The captured layers are called one by one, so what the
detour does to the result is done by a node of its own; everything else about it is only faster.

Source: ``TransformerEncoder.forward`` of torch 2.13 (its conditions are repeated here).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def clear_padding(output: Tensor, padding: Tensor, training: bool) -> Tensor:
    """Node function: zeros at padded positions where torch's encoder would use nested tensors.

    Args:
        output: of the encoder's last layer.
        padding: the key padding mask: ``True`` or ``-inf`` where a position is padding.
        training: whether the layers are in training mode.

    Shapes:
        - output: ``(batch, length, features)``
        - padding: ``(batch, length)``
    """
    if training or output.requires_grad or torch.is_autocast_enabled():
        return output
    if not torch.backends.mha.get_fastpath_enabled():
        return output
    is_padding = padding.bool()
    if not torch._nested_tensor_from_mask_left_aligned(output, ~is_padding):
        return output
    return output.masked_fill(is_padding.unsqueeze(-1), 0.0)


def clears_padding(encoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The padding mask of a call of an encoder that may use nested tensors; else None."""
    if type(encoder).forward is not nn.TransformerEncoder.forward or not encoder.use_nested_tensor:
        return None
    names = ("src", "mask", "src_key_padding_mask", "is_causal")
    given = dict(zip(names, args, strict=False)) | kwargs
    if given.get("mask") is not None or given["src"].dim() != 3:
        return None
    return given.get("src_key_padding_mask")
