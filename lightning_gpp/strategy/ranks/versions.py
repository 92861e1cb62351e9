"""What all ranks must have alike before they work together: versions of what they run."""

from __future__ import annotations

import platform
import socket

import lightning
import torch

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
