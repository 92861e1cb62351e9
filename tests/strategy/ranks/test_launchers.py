"""Lightning starts the ranks itself: from a script, by spawn and by fork; all end together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import launch_script
from helpers.processes import is_running, wait_until_ended
from helpers.reference import relative_error, weight_differences
from helpers.training import make_trainer

from lightning_gpp.strategy.lightning_private import PORTS

NUM_RANKS = launch_script.NUM_RANKS
LIMIT_S = 600.0
ORPHAN_LIMIT_S = 60.0


def start_script(
    strategy: str, folder: Path, fault: str = "none", *, own_session: bool = False
) -> subprocess.Popen[str]:
    """Starts the user's script in a process of its own, or in a session, as a terminal does."""
    tests = Path(__file__).parents[2]
    path = os.pathsep.join([str(tests), *filter(None, sys.path)])
    return subprocess.Popen(
        [sys.executable, launch_script.__file__, strategy, str(folder), fault],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=own_session,
    )


def run_script(
    strategy: str, folder: Path, fault: str = "none"
) -> subprocess.CompletedProcess[str]:
    """Runs the user's script in a process of its own."""
    script = start_script(strategy, folder, fault)
    try:
        output, errors = script.communicate(timeout=LIMIT_S)
    finally:
        script.kill()
        script.wait()
    return subprocess.CompletedProcess(script.args, script.returncode, output, errors)


def rank_pids(folder: Path, suffix: str = "pid") -> list[int]:
    """Process ids of the ranks, for whose beginning it waits, or until they have ``trained``."""
    end = time.monotonic() + LIMIT_S
    while len(
        texts := [path.read_text() for path in folder.glob(f"rank_*.{suffix}")]
    ) < NUM_RANKS or ("" in texts):
        assert time.monotonic() < end, texts
        time.sleep(0.1)
    return [int(text) for text in texts]


@pytest.mark.parametrize(
    "strategy",
    [
        "graphpipe",
        "graphpipe_spawn",
        pytest.param("graphpipe_fork", marks=pytest.mark.extra),  # as the notebook's
    ],
)
def test_training_from_a_script(strategy: str, tmp_path: Path) -> None:
    done = run_script(strategy, tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    # In-process reference; the script's main() is the user's whole program.
    launch_script.main("auto", tmp_path, "none")
    got, want = (torch.load(tmp_path / f"{name}.pt") for name in (strategy, "auto"))
    assert not weight_differences(got["weights"], want["weights"], 1e-9)
    assert relative_error(got["val_loss"], want["val_loss"]) < 1e-9
    # Whatever starts the processes, the script's Trainer knows how far they came.
    assert got["progress"] == want["progress"]
    assert got["progress"][0] == launch_script.NUM_STEPS
    assert relative_error(got["best_score"], want["best_score"]) < 1e-9
    assert set(got["logged"]) == set(want["logged"])
    assert relative_error(got["logged"]["val_loss"], want["logged"]["val_loss"]) < 1e-9
    assert len(list(tmp_path.glob("rank_*.pid"))) == NUM_RANKS


@pytest.mark.parametrize(
    ("strategy", "fault", "text"),
    [
        ("graphpipe_spawn", "raise", "the callback is out of order"),
        ("graphpipe", "raise", "rank 0 ends: rank 1 failed: ArithmeticError: the callback is out"),
        pytest.param("graphpipe", "kill", "rank 1", marks=pytest.mark.extra),  # see test_faults
    ],
)
def test_a_failing_rank_ends_the_job(strategy: str, fault: str, text: str, tmp_path: Path) -> None:
    done = run_script(strategy, tmp_path, fault)
    assert done.returncode != 0
    assert text in done.stderr.lower() or text in done.stderr, done.stderr[-4000:]
    if (strategy, fault) == ("graphpipe", "raise"):  # one traceback of both ranks, and a line
        assert done.stderr.count("Traceback") == 1
        assert text in done.stderr.splitlines()[-1]
    assert "terminate called" not in done.stderr, "a thread that listens outlived Python"
    wait_until_ended(rank_pids(tmp_path), ORPHAN_LIMIT_S)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_of_the_first_process_alone_ends_the_job(tmp_path: Path) -> None:
    """The stop button of a notebook and ``kill -INT`` do not reach the ranks."""
    script = start_script("graphpipe_spawn", tmp_path, "forever")
    try:
        pids = rank_pids(tmp_path)
        script.send_signal(signal.SIGINT)
        _, errors = script.communicate(timeout=LIMIT_S)
    finally:
        script.kill()
        script.wait()
    assert script.returncode == 1, errors[-4000:]
    assert not any(map(is_running, pids))


@pytest.mark.sampled(2, 1)
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("times", [1, 2])
def test_control_c_in_a_terminal_ends_the_job(times: int, tmp_path: Path) -> None:
    """It reaches all processes at once, and again while they end."""
    script = start_script("graphpipe", tmp_path, "forever", own_session=True)
    try:
        pids = rank_pids(tmp_path)
        for _ in range(times):
            os.killpg(script.pid, signal.SIGINT)
            time.sleep(0.3)
        _, errors = script.communicate(timeout=LIMIT_S)
    finally:
        script.kill()
        script.wait()
    assert script.returncode != 0, errors[-4000:]
    wait_until_ended(pids, ORPHAN_LIMIT_S)


@pytest.mark.sampled(4, 3)
@pytest.mark.parametrize("strategy", ["graphpipe", "graphpipe_spawn"])
@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_to_one_rank_ends_all_after_the_step(
    strategy: str, rank: int, tmp_path: Path
) -> None:
    """What ``kill`` and schedulers send; planning may outlast the wait for a step."""
    script = start_script(strategy, tmp_path, "forever")
    try:
        pids = rank_pids(tmp_path, "trained")
        os.kill(int((tmp_path / f"rank_{rank}.pid").read_text()), signal.SIGTERM)
        _, errors = script.communicate(timeout=LIMIT_S)
    finally:
        script.kill()
        script.wait()
    assert f"rank {rank} was asked to end (SIGTERM): all ranks end after this step" in errors
    assert "Traceback" not in errors or strategy == "graphpipe_spawn", errors[-4000:]
    wait_until_ended(pids, ORPHAN_LIMIT_S)


def test_a_stopped_rank_ends_the_job(tmp_path: Path) -> None:
    script = start_script("graphpipe", tmp_path, "forever")
    try:
        pids = rank_pids(tmp_path)
        os.kill(int((tmp_path / "rank_1.pid").read_text()), signal.SIGSTOP)
        _, errors = script.communicate(timeout=LIMIT_S)
    finally:
        script.kill()
        script.wait()
    assert script.returncode == 1
    assert "stopped or frozen" in errors.splitlines()[-1], errors[-4000:]
    wait_until_ended(pids, ORPHAN_LIMIT_S)


def test_ranks_that_leave_without_a_result_end_the_job(tmp_path: Path) -> None:
    """A process that is told 0 by all its ranks would wait for what rank 0 returns."""
    done = run_script("graphpipe_spawn", tmp_path, "leave")
    assert done.returncode == 1
    assert "sys.exit() was called on this rank before the run had ended" in done.stderr
    wait_until_ended(rank_pids(tmp_path), ORPHAN_LIMIT_S)


def test_ranks_meet_at_a_port_that_no_connection_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 listens some seconds after it was chosen; the user's own is kept."""
    for name in ("MASTER_PORT", "STANDALONE_PORT"):
        monkeypatch.delenv(name, raising=False)

    def port() -> int:
        trainer = make_trainer({}, 2)
        assert trainer.strategy.cluster_environment is not None  # type: ignore[attr-defined]
        return trainer.strategy.cluster_environment.main_port  # type: ignore[attr-defined,no-any-return]

    assert port() in PORTS
    monkeypatch.setenv("MASTER_PORT", "40123")
    assert port() == 40123
