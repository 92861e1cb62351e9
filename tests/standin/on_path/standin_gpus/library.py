"""The functions of the native library that torch's own interfaces do not reach."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from standin_gpus.start import LIBRARIES

FOLDER = Path(os.environ[LIBRARIES])
LIBRARY = ctypes.CDLL(str(FOLDER / "libstandin.so"), ctypes.RTLD_GLOBAL)
LIBRARY.standin_allocated_bytes.restype = ctypes.c_int64
LIBRARY.standin_peak_bytes.restype = ctypes.c_int64
LIBRARY.standin_hold.restype = ctypes.c_void_p
LIBRARY.standin_let_go.argtypes = [ctypes.c_void_p]

NUM_DEVICES = int(os.environ.get("LIGHTNING_GPP_STANDIN_DEVICES", "4"))
MEMORY_BYTES = 8 << 30


def current_device() -> int:
    """Index of this thread's device."""
    return LIBRARY.standin_device()


def set_current_device(index: int) -> None:
    """Changes this thread's device."""
    LIBRARY.standin_set_device(index)


def exchange_device(index: int) -> int:
    """Changes this thread's device, unless negative; returns the one before."""
    before = current_device()
    if index >= 0:
        set_current_device(index)
    return before


def device_index(device: object = None) -> int:
    """What ``torch.cuda`` takes for a device, as an index."""
    import torch

    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index
