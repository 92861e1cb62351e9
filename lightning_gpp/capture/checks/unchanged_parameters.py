"""A forward may not change parameters: a stage would repeat that out of the optimizer's sight."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_gpp.capture.errors import CaptureError
from lightning_gpp.common.num_changes import num_changes
from lightning_gpp.common.torch_device import widened


def parameter_state(parameter: Tensor) -> str:
    """Another text after any change of a parameter, through ``.data`` too, or of another one."""
    with torch.no_grad():
        total = math.nan if parameter.is_meta else _total(parameter.detach())
    return repr((id(parameter), num_changes(parameter), parameter.data_ptr(), total))


def _total(tensor: Tensor) -> float:
    """A sum of all of a tensor: of its bits as whole numbers, which is exact and quick, if it can.

    It wraps around.
    """
    if tensor.layout is torch.strided and tensor.is_contiguous():
        size_bytes = tensor.numel() * tensor.element_size()
        if not size_bytes % 8 and not tensor.data_ptr() % 8:
            return int(tensor.view(-1).view(torch.int64).sum())
    return float(widened(tensor.abs()).sum())


@contextmanager
def unchanged_parameters(module: nn.Module, changed_copies: Collection[str]) -> Iterator[None]:
    """Checks that the body leaves all parameters of a module as they are.

    Args:
        module: whose.
        changed_copies: names of those of which the body changed a copy on a device.

    Raises:
        CaptureError: the body changed or replaced one.
    """
    before = {name: parameter_state(item) for name, item in module.named_parameters()}
    yield
    after = {name: parameter_state(item) for name, item in module.named_parameters()}
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    changed |= set(changed_copies)
    if changed:
        raise CaptureError(
            f"forward changes or replaces {', '.join(map(repr, sorted(changed)))}: every stage and "
            "micro-batch would do so anew. Make what forward updates a buffer (register_buffer), "
            "and bound parameters (clamp, normalize, max_norm) where every rank does: in "
            "on_train_batch_start of a callback, or in optimizer_step after the step"
        )
