"""Training with tensors that have shapes and no numbers, for models larger than any memory here.

Everything runs as with numbers (the user's step, autograd, the optimizer, messages), on torch's
``meta`` device. What needs a number cannot: logged values are ``nan``, and what would decide by
them or keep them is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from lightning_gpp.common.tensor_places import exchange_tensors

META = torch.device("meta")

_NOTE = (
    'the devices are emulated with tensors="shape_only": tensors are on the meta device, have a '
    "shape and no numbers. Keep the step free of what needs numbers (item(), conditions, metrics), "
    'create tensors on self.device, or emulate with tensors="real".'
)


def drop_values(module: nn.Module) -> None:
    """Puts all parameters and buffers of a module on the ``meta`` device; tied ones stay tied."""
    exchange_tensors(module, lambda tensor: None if tensor.is_meta else tensor.detach().to(META))


def refuse_checkpoint() -> NotImplementedError:
    """The error of a checkpoint that is to be written."""
    return NotImplementedError(
        'with tensors="shape_only" there are no weights to save; train with tensors="real"'
    )


@contextmanager
def noting() -> Iterator[None]:
    """Errors of user code that needs numbers say why there are none."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        if "meta" in str(error).lower():
            error.add_note(_NOTE)
        raise
