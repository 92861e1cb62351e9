"""Kills, stops, terminates and interrupts ranks of a training; looks at what becomes of the others.

For every way to start the ranks, signal, rank and moment: a training with three ranks that writes
a checkpoint every two steps gets the signal at that moment. Then all ranks have to end within 30 s
(one that was stopped is killed after the look), the reason has to be in what the script prints, no
process may be left, the last checkpoint has to load, and training on from it has to lead to the
weights of a training that nothing disturbed (to 1e-9). The command ends with 1 if anything did
not hold.

    python benchmarks/faults.py                            # 128 cases, about 40 minutes
    python benchmarks/faults.py --starts popen --signals STOP
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as lp
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gpp import GraphPipeStrategy

STARTS = ("popen", "spawn", "fork", "torchrun")
SIGNALS = ("KILL", "STOP", "TERM", "INT")
MOMENTS = ("planning", "step", "validation", "checkpoint")
RANKS = (0, 1)
NUM_RANKS = 3
NUM_STEPS = 12
LIMIT_S = 30.0
START_S = 180.0


@dataclass(frozen=True)
class Case:
    """What happens to whom, and when."""

    start: str
    signal: str
    rank: int
    moment: str


@dataclass(frozen=True)
class Found:
    """What became of a training.

    Attributes:
        ended_s: seconds from the signal to the end of the last rank; None if one was left.
        reason: the last line printed that names a rank.
        left: processes that had to be killed after the limit.
        resumed: largest difference of a weight after training on from the last checkpoint.
    """

    ended_s: float | None
    reason: str
    left: tuple[str, ...]
    resumed: float

    @property
    def holds(self) -> bool:
        """Whether all was as it has to be."""
        return self.ended_s is not None and bool(self.reason) and self.resumed < 1e-9


# The training ------------------------------------------------------------------------------------


class Module(lp.LightningModule):
    """A chain of as many parts as there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(NUM_RANKS))
        )

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, 16)`` to ``(batch, 16)``."""
        y: Tensor = self.net(x)
        return y

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Mean square."""
        return self(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Logs the mean square."""
        self.log("val_loss", self(batch).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam, whose state a checkpoint has to hold."""
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Moments(lp.Callback):
    """Each rank leaves a file when it first comes to a moment, and stays there for a second."""

    def __init__(self, folder: Path, slow: str) -> None:
        self.folder = folder
        self.slow = slow

    def comes_to(self, moment: str, trainer: lp.Trainer) -> None:
        """Leaves the file with the number of this process."""
        path = self.folder / f"{trainer.global_rank}.{moment}"
        if not path.exists():
            path.write_text(str(os.getpid()))
            if moment == self.slow != "planning":
                time.sleep(1.0)

    def on_fit_start(self, trainer: lp.Trainer, pl_module: lp.LightningModule) -> None:
        """Half a second later rank 0 plans, and the others wait for it."""
        self.comes_to("planning", trainer)

    def on_train_batch_start(
        self, trainer: lp.Trainer, pl_module: lp.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """In the middle of the training."""
        if trainer.global_step == 5:
            self.comes_to("step", trainer)

    def on_validation_batch_start(
        self, trainer: lp.Trainer, pl_module: lp.LightningModule, *args: Any
    ) -> None:
        """The first one."""
        self.comes_to("validation", trainer)

    def on_save_checkpoint(
        self, trainer: lp.Trainer, pl_module: lp.LightningModule, checkpoint: Any
    ) -> None:
        """The third one."""
        if trainer.global_step == 6:
            self.comes_to("checkpoint", trainer)


def train(folder: Path, start: str, slow: str, checkpoint: str | None = None) -> Module:
    """Trains.

    Args:
        folder: for files and checkpoints.
        start: of the ranks; ``"alone"`` is one device.
        slow: moment at which every rank takes some time.
        checkpoint: to go on from.
    """
    torch.set_num_threads(1)
    lp.seed_everything(0, verbose=False)
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(16, generator=generator, dtype=torch.float64) for _ in range(16)]
    is_alone = start == "alone"
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    trainer = lp.Trainer(
        accelerator="cpu",
        devices=1 if is_alone else NUM_RANKS,
        strategy="auto" if is_alone else _strategy(start),
        max_steps=NUM_STEPS,
        max_epochs=-1,
        callbacks=[
            ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1),
            *([] if is_alone else [Moments(folder, slow)]),
        ],
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module().double()
    trainer.fit(module, DataLoader(data, 8), DataLoader(data, 8), ckpt_path=checkpoint)
    return module


def _strategy(start: str) -> Any:
    method: Any = "popen" if start == "torchrun" else start
    return GraphPipeStrategy(
        num_microbatches=2, plan=[["net.0"], ["net.1"], ["net.2"]], start_method=method
    )


# What becomes of it ------------------------------------------------------------------------------


def look_at(case: Case, folder: Path, undisturbed: dict[str, Tensor]) -> Found:
    """Runs a case."""
    command = [sys.executable]
    if case.start == "torchrun":
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    command += [__file__, "--train", str(folder), case.start, case.moment]
    with (folder / "printed").open("w") as printed:
        script = subprocess.Popen(
            command,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        pid = _pid_at(folder / f"{case.rank}.{case.moment}", script)
        pids = {rank: _pid_at(folder / f"{rank}.planning", script) for rank in range(NUM_RANKS)}
        if case.moment == "planning":
            time.sleep(0.5)
        begin = time.monotonic()
        os.kill(pid, getattr(signal, f"SIG{case.signal}"))
        watched = {f"rank {r}": p for r, p in pids.items()} | {"script": script.pid}
        if case.signal == "STOP":
            watched = {name: p for name, p in watched.items() if p != pid}
        ended_s = _ended(watched, script, begin)
    finally:
        left = _kill_session(script.pid)
        script.wait()
    lines = (folder / "printed").read_text().splitlines()
    words = (f"rank {case.rank} (", "(SIGTERM)", f"rank {case.rank} failed: KeyboardInterrupt")
    reasons = [line for line in lines if any(each in line for each in words)]
    # Its starter kills a stopped rank; nobody can kill the stopped process that started the others.
    is_first = case.rank == 0 and case.start == "popen"
    allowed = {str(pid)} if case.signal == "STOP" and is_first else set()
    return Found(
        ended_s if set(left) <= allowed else None,
        reasons[-1] if reasons else "",
        tuple(left),
        _difference_after_resuming(folder, undisturbed),
    )


def _pid_at(path: Path, script: subprocess.Popen[bytes]) -> int:
    end = time.monotonic() + START_S
    while not (path.exists() and path.read_text()):
        if script.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"the training never came to {path.name}")
        time.sleep(0.02)
    return int(path.read_text())


def _ended(watched: dict[str, int], script: subprocess.Popen[bytes], begin: float) -> float | None:
    """Seconds until the last process has ended."""
    while time.monotonic() < begin + LIMIT_S:
        script.poll()
        if not any(_runs(pid) for pid in watched.values()):
            return time.monotonic() - begin
        time.sleep(0.05)
    return None


def _runs(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def _kill_session(session: int) -> list[str]:
    """Kills what is left of a session; the process ids."""
    left = []
    time.sleep(1.0)  # helpers of multiprocessing end after their parents
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            left.append(stat.parent.name)
            os.kill(int(stat.parent.name), signal.SIGKILL)
    return left


def _difference_after_resuming(folder: Path, undisturbed: dict[str, Tensor]) -> float:
    checkpoints = sorted(
        folder.glob("step=*.ckpt"), key=lambda path: int(path.stem.rpartition("=")[2])
    )
    with tempfile.TemporaryDirectory() as other, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        last = str(checkpoints[-1]) if checkpoints else None
        weights = train(Path(other), "alone", "", last).state_dict()
    return max(float((weights[name] - w).abs().max()) for name, w in undisturbed.items())


# The command -------------------------------------------------------------------------------------


def holds(case: Case, undisturbed: dict[str, Tensor]) -> bool:
    """Runs a case and prints what became of it; whether all is as it has to be."""
    head = f"{case.start:9}{case.signal:5} rank {case.rank} {case.moment:11}"
    with tempfile.TemporaryDirectory() as name:
        try:
            found = look_at(case, Path(name), undisturbed)
        except Exception as error:  # shown as this case's result
            print(f"{head} {error}\n{(Path(name) / 'printed').read_text()}", flush=True)
            return False
        printed = (Path(name) / "printed").read_text()
    ended = "  left" if found.ended_s is None else f"{found.ended_s:5.1f}s"
    print(
        f"{head} {'held' if found.holds else 'FAILED':6} {ended} resumed {found.resumed:.0e} "
        f"{len(printed.splitlines()):4} lines: {found.reason[:110]}",
        flush=True,
    )
    if not found.holds:
        print(f"{found}\n{printed[-3000:]}", flush=True)
    return found.holds


def main() -> int:
    """The command."""
    if sys.argv[1:2] == ["--train"]:
        train(Path(sys.argv[2]), *sys.argv[3:5])
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=STARTS)
    parser.add_argument("--signals", nargs="+", choices=SIGNALS, default=SIGNALS)
    parser.add_argument("--ranks", nargs="+", type=int, choices=RANKS, default=RANKS)
    parser.add_argument("--moments", nargs="+", choices=MOMENTS, default=MOMENTS)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        undisturbed = train(Path(folder), "alone", "").state_dict()
    found = itertools.product(asked.starts, asked.signals, asked.ranks, asked.moments)
    cases = [Case(*each) for each in found]
    num_held = sum(holds(case, undisturbed) for case in cases)
    print(f"{num_held} of {len(cases)} held")
    return 0 if num_held == len(cases) else 1


if __name__ == "__main__":
    sys.exit(main())
