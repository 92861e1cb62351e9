"""Whether code draws random numbers from torch, on the CPU or on a device."""

from __future__ import annotations

import torch
from torch import Tensor


class Generators:
    """The default generators as they were when this was made.

    Args:
        device: that has one beside the CPU's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states = self._now()

    def have_drawn(self) -> bool:
        """Whether a state is another now."""
        return not all(map(torch.equal, self._states, self._now()))

    def _now(self) -> list[Tensor]:
        states = [torch.random.get_rng_state()]
        if self._device.type not in ("cpu", "meta"):
            states.append(torch.get_device_module(self._device).get_rng_state(self._device))
        return states
