"""What the ranks of a job compute on, and by which backend they can talk.

Every rank sees its own device only, so they tell each other first: a rank that chose by itself
would speak NCCL to one that listens with gloo.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_gpp.common.torch_device import device_uuid, is_accelerator


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


def common_backend(devices: Sequence[RankDevice]) -> str:
    """By which backend some ranks exchange tensors of their devices; the same on all of them.

    GPUs talk by their own; NCCL refuses two ranks on one GPU. Whatever is mixed uses gloo, which
    moves memory of CPUs only: what is on a GPU is staged through it.

    >>> cpu, gpu, other = RankDevice("cpu", "a"), RankDevice("cuda", "b"), RankDevice("cuda", "c")
    >>> [common_backend(ranks) for ranks in ((cpu, cpu), (gpu, gpu), (cpu, gpu))]
    ['gloo', 'gloo', 'gloo']
    """
    types = {device.type for device in devices}
    if len(types) > 1 or len({device.identity for device in devices}) < len(devices):
        return "gloo"
    return device_backend(torch.device(types.pop()))


@cache
def host_identity() -> str:
    """What tells this host, and its network and process numbers, from others."""
    parts = [socket.gethostname()]
    for path in ("sys/kernel/random/boot_id", "self/ns/net", "self/ns/pid"):
        with contextlib.suppress(OSError):
            place = Path("/proc", path)
            parts.append(str(place.readlink()) if place.is_symlink() else place.read_text().strip())
    return " ".join(parts)


def pipelines_of(num_pipelines: int) -> list[range]:
    """The ranks of each of some pipelines side by side; they follow each other."""
    size = dist.get_world_size() // num_pipelines
    return [range(index * size, (index + 1) * size) for index in range(num_pipelines)]


def own_group(sets: Iterable[Sequence[int]], backend: str, timeout: timedelta) -> Any:
    """All ranks of the world: makes a process group of each set; the one that this rank is in."""
    groups = [list(ranks) for ranks in sets]
    return dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
        groups, timeout=timeout, backend=backend
    )[0]


def meet() -> None:
    """Waits for all ranks; torch's own barrier would queue a kernel on GPUs and wait for it."""
    dist.all_reduce(torch.zeros(1, device="cpu"))
