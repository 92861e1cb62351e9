"""Hosts, as processes of this one: started by ``torchrun`` and by SLURM's variables."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import hosts_script
from helpers.models import ExportableModel
from helpers.namespaces import Host, NoNamespacesError, two_hosts
from helpers.reference import train_one_device, weight_differences
from helpers.training import Training
from helpers.workers import free_port

LIMIT_S = 600.0
SOON = "last_call_timeout=8,keep_alive_interval=2,keep_alive_max_attempt=3"
"""How long torchrun waits for hosts that may come, and for signs of life."""


def train_on_hosts(
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    folder: Path,
    may_end: Sequence[int] = (0,),
) -> dict[str, Any]:
    """What rank 0 saved, once all of these processes have ended, with one of these codes."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command, environment in zip(commands, environments, strict=True)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=LIMIT_S)
            assert process.returncode in may_end, errors[-4000:]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    saved: dict[str, Any] = torch.load(folder / "trained.pt")
    return saved


def assert_as_on_one_device(saved: Mapping[str, Any]) -> None:
    """Both pipelines read all the data in these jobs, so the mean of their gradients is each's."""
    training = Training(ExportableModel, hosts_script.DATA, hosts_script.NUM_STEPS, validate=False)
    expected = train_one_device(training).weights
    assert not weight_differences(saved["weights"], expected, 1e-9)


def torchrun(
    folder: Path, nodes: str, ranks: int, *more: str, address: str = "127.0.0.1"
) -> list[list[str]]:
    """Two hosts with so many ranks of the script each; the first one is where they meet."""
    run = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}"]
    run += [f"--nproc-per-node={ranks}", "--rdzv-backend=c10d", "--rdzv-id=job"]
    run += [f"--rdzv-endpoint={address}:{free_port()}"]
    script = [*more, hosts_script.__file__, str(folder), str(ranks)]  # as many pipelines
    first, second = ([*run, f"--rdzv-conf=is_host={host},{SOON}"] for host in (1, 0))
    return [[*first, *script], [*second, *script]]


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts with a link of their own, where the machine has them."""
    with ExitStack() as stack:
        try:
            found = stack.enter_context(two_hosts())
        except NoNamespacesError as error:
            pytest.skip(f"no network namespaces: {error}")
        yield found


def test_torchrun_over_a_link(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """Messages of one pipeline between hosts that share no addresses."""
    local = torchrun(tmp_path, "2", 1, address=hosts[0].address)
    commands = []
    for host, run in zip(hosts, local, strict=True):
        run.insert(3, f"--local-addr={host.address}")  # both namespaces have this machine's name
        commands.append(host.command(run))
    environments = [host.environment for host in hosts]
    assert_as_on_one_device(train_on_hosts(commands, environments, tmp_path))


def test_a_host_is_lost(tmp_path: Path) -> None:
    """Each has a pipeline; the ranks of the other go on from the last checkpoint as two of one."""
    kept, lost = torchrun(tmp_path, "1:2", 2, "--max-restarts=2")
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    killed = -signal.SIGKILL
    saved = train_on_hosts([kept, [*lost, "lost"]], [environment] * 2, tmp_path, (0, killed))
    assert saved["num_ranks"] == 2
    assert_as_on_one_device(saved)


def test_slurm_on_two_hosts(tmp_path: Path) -> None:
    command = [sys.executable, hosts_script.__file__, str(tmp_path), "1"]
    job = {
        "SLURM_JOB_ID": str(free_port()),  # the port is made of its last digits
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_LOCALID": "0",
    }
    places = [{**job, "SLURM_PROCID": rank, "SLURM_NODEID": rank} for rank in "01"]
    assert_as_on_one_device(train_on_hosts([command] * 2, places, tmp_path))
