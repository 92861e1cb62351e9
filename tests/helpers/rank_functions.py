"""Functions that the tests of the worker pool run on ranks."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist


def sum_of_ranks(offset: int) -> tuple[int, int]:
    """Joins a process group and adds up the ranks."""
    dist.init_process_group("gloo")
    total = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def raise_on(rank: int) -> str:
    """Raises on one rank."""
    if int(os.environ["RANK"]) == rank:
        sys.stdout.write("about to raise\n")
        raise ValueError(f"rank {rank} is out of order") from KeyError("the cause")
    return "fine"


def hang_on(rank: int) -> None:
    """Waits forever on one rank."""
    while int(os.environ["RANK"]) == rank:
        time.sleep(0.1)


def die_on(rank: int) -> None:
    """Kills the process of one rank."""
    if int(os.environ["RANK"]) == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def leave_a_thread() -> None:
    """Starts a thread that outlives the call."""
    threading.Thread(target=time.sleep, args=(6,), name="forgotten", daemon=True).start()


def change_process() -> None:
    """Changes everything that the next call must not see."""
    os.environ["LEFT_BEHIND"] = "1"
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")


def process_state() -> tuple[bool, str, bool, bool]:
    """What :func:`change_process` changed, and whether Lightning sees launched processes."""
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    return (
        "LEFT_BEHIND" in os.environ,
        str(torch.get_default_dtype()),
        dist.is_initialized(),
        TorchElasticEnvironment.detect(),
    )
