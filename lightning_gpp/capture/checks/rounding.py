"""How far two results may be apart that are the same but for rounding."""

from __future__ import annotations

import torch

from lightning_gpp.common.torch_device import types_in_use

COARSE = 2e-2
"""In half precision (a unit in the last place of bfloat16 is 0.8 %)."""

_TF32 = 5e-3
"""In TF32 (a unit in the last place is 0.1 %)."""

_OTHER_SIZES = 1e-4


def relative_tolerance(dtype: torch.dtype, *, of_float32: float) -> float:
    """The largest difference, relative to the largest element, that rounding explains.

    Under autocast a result may be of float32 and have been rounded to half precision before.

    Args:
        dtype: of the results.
        of_float32: what is taken for rounding in float32, which depends on what is compared.

    >>> relative_tolerance(torch.float64, of_float32=1e-5)
    1e-09
    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     relative_tolerance(torch.float32, of_float32=1e-5)
    0.02
    """
    if dtype in (torch.float64, torch.complex128):
        return 1e-9  # not cast by autocast
    return of_float32 if dtype is torch.float32 and not is_autocast() else COARSE


def of_other_sizes(device: torch.device) -> float:
    """What is rounding in float32 between results of the same samples in batches of other sizes.

    Other sizes are computed by other kernels. GPUs that can compute convolutions in TF32 unless
    told otherwise, and products of matrices if told.

    Args:
        device: that computed them.

    >>> of_other_sizes(torch.device("cpu"))
    0.0001
    """
    return _TF32 if is_tf32(device) else _OTHER_SIZES


def is_tf32(device: torch.device) -> bool:
    """Whether a device may compute in TF32 what is in float32."""
    if (
        device.type != "cuda"
        or torch.version.hip
        or torch.cuda.get_device_capability(device)[0] < 8
    ):
        return False
    switches = (
        torch.backends.cuda.matmul,
        torch.backends.cudnn.conv,  # type: ignore[attr-defined]
        torch.backends.cudnn.rnn,
    )
    return any(switch.fp32_precision == "tf32" for switch in switches)


def is_autocast() -> bool:
    """Whether computations are cast on any type of device."""
    return any(torch.is_autocast_enabled(kind) for kind in types_in_use())
