"""What ``torch.cuda`` and its like are in a build with CUDA."""

from __future__ import annotations

from standin_gpus import devices, memory, nccl, random_states, storages, streams


def apply() -> None:
    """Patches the torch that was just imported."""
    devices.apply()
    streams.apply()
    memory.apply()
    random_states.apply()
    storages.apply()
    nccl.apply()
