"""What all ranks must have alike before they work together: versions of what they run."""

from __future__ import annotations

import platform
import socket
from collections.abc import Mapping

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
    mine = versions_here()
    found = control.gather((socket.gethostname(), mine), "comparing the versions of packages")
    for rank, (host, versions) in enumerate(found):
        _refuse_other(mine, f"rank {rank} on {host}", versions)
    if peers is not None and control.is_leader:
        of_first = peers.share(mine, "comparing the versions of packages over pipelines")
        _refuse_other(mine, "the first pipeline", of_first)


def versions_here() -> dict[str, str]:
    """What this rank runs."""
    return {
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "lightning": lightning.__version__,
        "lightning_gpp": __version__,
    }


def _refuse_other(mine: Mapping[str, str], whose: str, versions: Mapping[str, str]) -> None:
    other = [name for name in mine if versions[name] != mine[name]]
    if other:
        here, there = (
            ", ".join(f"{name} {each[name]}" for name in other) for each in (mine, versions)
        )
        raise RuntimeError(
            f"{whose} has {there}, but {socket.gethostname()} has {here}; install the same "
            "versions on all hosts"
        )
