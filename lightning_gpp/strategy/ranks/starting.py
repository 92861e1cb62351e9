"""What all ranks must have alike before they work together: versions of what they run."""

from __future__ import annotations

import os
import platform
import socket

import lightning
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_gpp._version import __version__
from lightning_gpp.runtime.processes.peers import Peers
from lightning_gpp.strategy.ranks.control import Control


def check_versions(control: Control, peers: Peers | None) -> None:
    """All ranks: compares versions with those of rank 0, and of the first pipeline.

    Raises:
        RuntimeError: on the first rank of a pipeline, where they differ.
    """
    mine, host = versions_here(), socket.gethostname()
    gathered = control.gather((host, mine), "comparing the versions of packages")
    found = {f"rank {rank} on {other}": each for rank, (other, each) in enumerate(gathered)}
    if peers is not None and control.is_leader:
        of_first = peers.share(mine, "comparing the versions of packages over pipelines")
        found["the first pipeline"] = of_first
    for whose, versions in found.items():
        if other := [name for name in mine if versions[name] != mine[name]]:
            there = ", ".join(f"{name} {versions[name]}" for name in other)
            here = ", ".join(f"{name} {mine[name]}" for name in other)
            raise RuntimeError(
                f"{whose} has {there}, but {host} has {here}; install the same versions on all "
                "hosts"
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
