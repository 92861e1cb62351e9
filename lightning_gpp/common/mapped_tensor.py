"""Tensors in memory-mapped files, which the operating system can page out.

A model of which no process is to have the whole is made, captured and measured as any other, with
parameters that are mapped from files. What is not in use lies on the disk; a file has no name and
goes with its tensor. The files are in the folder for temporary files (``TMPDIR``), which must not
be one in memory (``tmpfs``).
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt, in malloc.h

_PIECE_BYTES = 16 << 20

LEAST_BYTES = 1 << 16
"""Smaller tensors stay in memory: a process may map some 65000 files."""


def empty_mapped(shape: tuple[int, ...], dtype: Any) -> Tensor:
    """An uninitialised tensor in a file of its own; in memory if it is small.

    Raises:
        OSError: the disk is full; the text names the folder.

    >>> is_mapped(empty_mapped((256, 256), torch.float32))
    True
    >>> is_mapped(empty_mapped((2, 2), torch.float32))
    False
    """
    kind = torch.empty(shape, dtype=dtype, device="meta")
    num_bytes = kind.numel() * kind.element_size()
    if num_bytes < LEAST_BYTES:
        return torch.empty(shape, dtype=dtype, device="cpu")
    file, path = tempfile.mkstemp(prefix="lightning_gpp_")
    try:
        os.posix_fallocate(file, 0, num_bytes)
        flat = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    except OSError as error:
        error.add_note(
            f"a tensor of {num_bytes} bytes was to lie in {os.path.dirname(path)}; set TMPDIR to a "
            "folder with more space"
        )
        raise
    finally:
        os.close(file)
        os.unlink(path)
    return flat.view(dtype).view(shape)


def is_mapped(tensor: Tensor) -> bool:
    """Whether a tensor lies in a file."""
    return _is_plain(tensor) and tensor.untyped_storage().filename is not None


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type == "cpu"


def mapped(tensor: Tensor) -> Tensor:
    """The same values in a file; the tensor itself if it is small or not on the CPU."""
    if not _is_plain(tensor) or is_mapped(tensor) or tensor.nbytes < LEAST_BYTES:
        return tensor
    return empty_mapped(tuple(tensor.shape), tensor.dtype).copy_(tensor.detach())


def in_memory(tensor: Tensor) -> Tensor:
    """The same values in memory of this process."""
    return tensor.clone() if is_mapped(tensor) else tensor


@contextmanager
def mapping_modules() -> Iterator[None]:
    """Parameters and buffers that modules get in this lie in files from then on, if large."""

    def move(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        if tensor is None or tensor.is_meta:
            return
        if tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes:
            tensor.data = mapped(tensor.data)  # whose memory nobody shares

    handles = [
        register_module_parameter_registration_hook(move),
        register_module_buffer_registration_hook(move),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def freed_at_once() -> Iterator[None]:
    """Memory that is freed in this goes back to the system at once, as far as there is a way.

    The C library of Linux keeps blocks of up to 32 MiB once such have been freed (mallopt(3),
    ``M_MMAP_THRESHOLD``), in pieces that the next large tensor often does not fit into: the memory
    of a process grows to a multiple of what lives. That is quicker for training, and set again
    after.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        yield
        return
    mallopt(_MMAP_THRESHOLD, 1 << 20)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, 32 << 20)
        mallopt(_TRIM_THRESHOLD, 64 << 20)


def in_pieces(sizes_bytes: Iterable[int]) -> Iterator[slice]:
    """Runs of tensors that move together: as many as 16 MiB hold, or one that is larger.

    >>> list(in_pieces([8 << 20, 8 << 20, 40 << 20, 1]))
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None)]
    """
    begin = end = size = 0
    for size_bytes in sizes_bytes:
        if end > begin and size + size_bytes > _PIECE_BYTES:
            yield slice(begin, end)
            begin, size = end, 0
        end, size = end + 1, size + size_bytes
    if end > begin:
        yield slice(begin, end)
