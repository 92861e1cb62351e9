"""When received tensors are complete on a device: its streams wait for that, the host does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Arrival:
    """Tensors that a stream of its own still writes.

    Attributes:
        device: where they are.
        event: recorded on that stream once they are complete.
        tensors: allocated on that stream.
    """

    device: torch.device
    event: Any
    tensors: Sequence[Tensor]

    def wait(self) -> None:
        """What this thread queues from now on runs after the arrival."""
        reader = torch.get_device_module(self.device).current_stream(self.device)
        reader.wait_event(self.event)
        for tensor in self.tensors:
            tensor.record_stream(reader)  # who frees it will have used it there
