"""What all ranks must have alike before they work together: versions of what they run."""

from __future__ import annotations

import os
import platform
import socket
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_gpp._version import __version__


def check_versions() -> None:
    """All ranks: compares versions with those of rank 0.

    Raises:
        RuntimeError: they differ.
    """
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (socket.gethostname(), versions_here()))
    host, mine = found[0]
    for rank, (there, versions) in enumerate(found):
        if other := [name for name in mine if versions[name] != mine[name]]:
            theirs = ", ".join(f"{name} {versions[name]}" for name in other)
            ours = ", ".join(f"{name} {mine[name]}" for name in other)
            raise RuntimeError(
                f"rank {rank} on {there} has {theirs}, but {host} has {ours}; install the same "
                "versions on all hosts"
            )


def versions_here() -> dict[str, str]:
    """What this rank runs."""
    return {
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "lightning": lightning.__version__,
        "lightning_gpp": __version__,
    }


_REMEDY = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Makes every round of ``torchrun`` have a store of its own."""


def warn_of_old_addresses() -> None:
    """Says how to start ``torchrun`` so that ranks that it starts again find each other.

    All rounds of a job share a store by default, with the same names: the ranks of a second round
    read there at which addresses those of the first one listened, and fail or wait (torch 2.13).
    """
    most = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if most != "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        rank_zero_warn(
            f"torchrun may start the ranks again (--max-restarts={most}), but they would look for "
            f"each other at addresses of before: set {_REMEDY}=1 where torchrun is started"
        )
