"""SLURM interrupts a job that then puts itself back in the queue (``auto_requeue``)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import slurm_script
from helpers.reference import relative_error

LIMIT_S = 200.0
TASK = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2"}
TASK |= {"SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1", "SLURM_NODEID": "0"}
TASK |= {"SLURM_JOB_NODELIST": "localhost", "SLURM_NODELIST": "localhost"}
TASK |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}


def start_job(folder: Path, checkpoint: str, weights: str) -> list[subprocess.Popen[str]]:
    """As ``srun`` starts the tasks; ``scontrol`` only writes down what it is asked."""
    scontrol = folder / "bin" / "scontrol"
    scontrol.parent.mkdir(exist_ok=True)
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {folder}/scontrol.txt\n')
    scontrol.chmod(0o755)
    tests = str(Path(slurm_script.__file__).parents[1])
    environment = {
        **os.environ,
        **TASK,
        "PATH": os.pathsep.join([str(scontrol.parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([tests, *filter(None, sys.path)]),
    }
    return [
        subprocess.Popen(
            [sys.executable, slurm_script.__file__, checkpoint, weights],
            env={**environment, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            cwd=folder,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def end_job(tasks: list[subprocess.Popen[str]]) -> None:
    errors = []
    try:
        errors = [task.communicate(timeout=LIMIT_S)[1] for task in tasks]
    finally:
        for task in tasks:
            task.kill()
            task.wait()
    assert [task.returncode for task in tasks] == [0, 0], errors


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("signalled", [(0, 1), (1,)])
def test_all_ranks_save_and_the_job_is_requeued_once(
    signalled: tuple[int, ...], tmp_path: Path
) -> None:
    tasks = start_job(tmp_path, "", "first.pt")
    limit = time.monotonic() + LIMIT_S
    while not (tmp_path / "began").exists() and time.monotonic() < limit:
        time.sleep(0.05)
    for rank in signalled:
        tasks[rank].send_signal(signal.SIGUSR1)
        time.sleep(0.1)  # ranks get it in different steps
    end_job(tasks)
    assert (tmp_path / "scontrol.txt").read_text().splitlines() == ["requeue 4711"]
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=False)
    assert 5 <= saved["global_step"] < 80

    end_job(start_job(tmp_path, "hpc", "resumed.pt"))
    whole, resumed = (torch.load(tmp_path / name) for name in ("first.pt", "resumed.pt"))
    for name, weight in whole.items():
        assert relative_error(resumed[name], weight) < 1e-9, name
