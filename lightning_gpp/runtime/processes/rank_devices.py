"""What the ranks of a job compute on, and by which wire they can talk.

Every rank sees its own device only, so they tell each other first: a rank that chose by itself
would speak NCCL to one that listens with gloo.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_gpp.common.torch_device import device_uuid, is_accelerator
from lightning_gpp.runtime.processes.rank_sockets import host_identity


class Wire(enum.Enum):
    """How messages go."""

    SHARED_MEMORY = "shared memory"
    DEVICES = "the backend of the devices"
    GLOO = "gloo"


@dataclass(frozen=True, slots=True)
class RankDevice:
    """The device of one rank.

    Attributes:
        type: as torch has it (``"cpu"``, ``"cuda"``, ``"xpu"``).
        identity: tells it from every other device of the job; of a CPU it names the host.
    """

    type: str
    identity: str

    @classmethod
    def of(cls, device: torch.device) -> RankDevice:
        """What this rank has; a GPU is known by its UUID, since every process may count its own."""
        host = host_identity()
        if not is_accelerator(device):
            return cls(device.type, host)
        return cls(device.type, device_uuid(device) or f"{host} {device}")


def gather_rank_devices(device: torch.device) -> tuple[RankDevice, ...]:
    """All ranks, together: the device of every rank."""
    found: list[RankDevice | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, RankDevice.of(device))
    return tuple(each for each in found if each is not None)


def device_backend(device: torch.device) -> str:
    """What ``torch.distributed`` moves tensors of a device with; gloo is for those of the CPU."""
    return dist.get_default_backend_for_device(device) if is_accelerator(device) else "gloo"


def choose_wire(devices: Sequence[RankDevice]) -> Wire:
    """The fastest wire that joins some ranks; the same on all of them.

    GPUs talk by their own backend; NCCL refuses two ranks on one GPU. CPUs of one host share
    memory. Whatever is mixed uses gloo, which moves memory of CPUs only: what is on a GPU is staged
    through it.

    >>> cpu, gpu, other = RankDevice("cpu", "a"), RankDevice("cuda", "b"), RankDevice("cuda", "c")
    >>> [choose_wire(ranks).value for ranks in ((cpu, cpu), (gpu, other), (gpu, gpu), (cpu, gpu))]
    ['shared memory', 'the backend of the devices', 'gloo', 'gloo']
    """
    types = {device.type for device in devices}
    identities = {device.identity for device in devices}
    if types == {"cpu"} and len(identities) == 1:
        return Wire.SHARED_MEMORY
    if len(types) > 1 or len(identities) < len(devices):
        return Wire.GLOO
    is_gloo = device_backend(torch.device(types.pop())) == "gloo"
    return Wire.GLOO if is_gloo else Wire.DEVICES
