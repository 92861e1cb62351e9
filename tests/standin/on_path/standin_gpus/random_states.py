"""``torch.cuda.default_generators``: the library has a generator of the host for each device."""

from __future__ import annotations

import ctypes
import os

import torch
import torch.cuda
from torch import Tensor

from standin_gpus.library import LIBRARY, NUM_DEVICES

STATE_BYTES = 8192
"""More than a state needs."""


class Generator:
    """The generator of one device; what is queued has its random numbers already."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._seed = 0

    def manual_seed(self, seed: int) -> Generator:
        self._seed = int(seed) & (2**64 - 1)
        LIBRARY.standin_seed(self._index, ctypes.c_uint64(self._seed))
        return self

    def seed(self) -> int:
        return self.manual_seed(int.from_bytes(os.urandom(7), "little"))._seed

    def initial_seed(self) -> int:
        return self._seed

    def get_state(self) -> Tensor:
        data = ctypes.create_string_buffer(STATE_BYTES)
        size = LIBRARY.standin_random_state(self._index, data, STATE_BYTES)
        return torch.frombuffer(bytearray(data.raw[:size]), dtype=torch.uint8)

    def set_state(self, state: Tensor) -> None:
        if state.device.type != "cpu" or state.dtype != torch.uint8:
            raise TypeError("RNG state must be a torch.ByteTensor")
        data = state.numpy().tobytes()
        LIBRARY.standin_set_random_state(self._index, data, len(data))

    graphsafe_get_state = get_state


def apply() -> None:
    """Patches the generators."""
    torch.cuda.default_generators = tuple(Generator(index) for index in range(NUM_DEVICES))
