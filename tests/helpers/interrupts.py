"""Interrupts a training of two ranks at chosen points, and one device at the same ones.

``python tests/helpers/interrupts.py`` prints a line for every signal and point; further arguments
are parts of their names (``term:saving``). The ranks are forked from one process that has imported
everything, and get torchrun's environment, or that of SLURM for SIGUSR1. Both trainings are
compared: how they ended, whether there is a checkpoint, of which step, and the weights to which
one device trains on from it. All batches are alike, as an ordinary loader begins an epoch anew.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from standin.switch import devices
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from helpers.small_chain import SmallChain
from helpers.training import quiet
from helpers.workers import free_port
from lightning_gpp import GraphPipeStrategy
from lightning_gpp.strategy import build, pipeline_of_plan
from lightning_gpp.strategy.state.partition import Partition

NUM_STEPS, STEP, LIMIT_S = 9, 4, 200.0
SIGNALS = {"int": signal.SIGINT, "term": signal.SIGTERM, "usr1": signal.SIGUSR1}
POINTS = (
    "setup", "fit_start", "train_start", "first_batch", "capture", "measuring", "planning",
    "placing", "batch_start", "before_forward", "stage", "stage_of_rank_1", "after_forward",
    "backward", "before_optimizer", "batch_end", "batch_end_of_rank_1", "validation_start",
    "validation_step", "saving", "written", "epoch_end", "train_end",
)  # fmt: skip
OURS_ALONE = {
    "capture": "before_forward_0", "measuring": "before_forward_0", "planning": "before_forward_0",
    "placing": "before_forward_0", "stage": "before_forward", "stage_of_rank_1": "before_forward",
    "batch_end_of_rank_1": "batch_end",
}  # fmt: skip
"""Points that one device has not, and where it is interrupted instead."""
IN_FIRST_STEP = ("capture", "measuring", "planning", "placing")
MASTER = {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
SLURM = {
    "SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train", "SLURM_NNODES": "1", "SLURM_NODEID": "0",
    "SLURM_JOB_NODELIST": "localhost", "SLURM_NODELIST": "localhost",
}  # fmt: skip


def _rank() -> int:
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))


class Bell:
    """Sends the signal to all ranks at the point, once.

    Args:
        point: where.
        sent: the signal; None rings never.
        folder: gets a file when it has.

    Attributes:
        step: that this rank is at.
    """

    def __init__(self, point: str, sent: signal.Signals | None, folder: Path) -> None:
        self._point, self._sent, self._mark = point, sent, folder / "rung"
        self.step = 0

    def at(self, point: str) -> None:
        """Rank 0, or the rank that the point names, is there."""
        is_here = _rank() == int(point.endswith("of_rank_1"))
        if self._sent is not None and point == self._point and is_here and not self._mark.exists():
            self._mark.touch()
            os.killpg(0, self._sent)


class Rung(SmallChain):
    """A model with bells in its steps."""

    bell: Bell

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """As it was, with the points in it."""
        is_step = self.global_step == STEP
        self.bell.at("before_forward" if is_step else f"before_forward_{self.global_step}")
        loss = super().training_step(batch, index)
        if is_step:
            self.bell.at("after_forward")
            loss.register_hook(lambda _: self.bell.at("backward"))
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        """In the midst of training, not in the sanity check."""
        self(batch[0])
        if not self.trainer.sanity_checking:
            self.bell.at("validation_step")


class Bells(pl.Callback):
    """Points in hooks."""

    def __init__(self, bell: Bell) -> None:
        self.bell = bell

    def setup(self, *_: Any, **__: Any) -> None:
        self.bell.at("setup")

    def on_fit_start(self, *_: Any) -> None:
        self.bell.at("fit_start")

    def on_train_start(self, *_: Any) -> None:
        self.bell.at("train_start")

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.bell.step = trainer.global_step
        if trainer.global_step in (0, STEP):
            self.bell.at("batch_start" if trainer.global_step else "first_batch")

    def on_after_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == STEP and not _rank():
            time.sleep(0.3)  # rank 1 steps its optimizer meanwhile

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == STEP:
            self.bell.at("before_optimizer")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == STEP + 1:
            self.bell.at("batch_end")
            self.bell.at("batch_end_of_rank_1")

    def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.bell.at("validation_start")

    def on_save_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
        self.bell.at("saving")

    def on_train_epoch_end(self, *_: Any) -> None:
        self.bell.at("epoch_end")

    def on_train_end(self, *_: Any) -> None:
        self.bell.at("train_end")


@contextlib.contextmanager
def _bells_inside(bell: Bell) -> Iterator[None]:
    """Points in the midst of the package and of writing."""
    places: list[tuple[Any, str, str]] = [
        (build, "capture", "capture"),
        (build, "profile_costs", "measuring"),
        (build, "plan_pipeline", "planning"),
        (Partition, "spread", "placing"),
        (torch, "save", "written"),
    ]

    def ringing(function: Callable[..., Any], point: str) -> Callable[..., Any]:
        def rung(*args: Any, **kwargs: Any) -> Any:
            bell.at(point)
            return function(*args, **kwargs)

        return rung

    called = pipeline_of_plan._called

    def of_stage(stage: Any) -> Any:
        function = called(stage)

        def rung(*args: Any) -> Any:
            if bell.step == STEP:
                bell.at("stage")
                bell.at("stage_of_rank_1")
            return function(*args)

        return rung

    with contextlib.ExitStack() as stack:
        for owner, name, point in places:
            function = ringing(getattr(owner, name), point)
            stack.enter_context(mock.patch.object(owner, name, function))
        stack.enter_context(mock.patch.object(pipeline_of_plan, "_called", of_stage))
        yield


def train(folder: Path, bell: Bell, num_ranks: int, checkpoint: Path | None = None) -> None:
    """What every rank does; rank 0 writes the weights if it gets to the end."""
    torch.manual_seed(3)
    module = Rung().double()
    module.bell = bell
    rows = torch.randn(8, 4).double(), torch.randn(8, 2).double()
    data = DataLoader(TensorDataset(*(each.repeat(6, 1) for each in rows)), 8)
    is_slurm = "SLURM_JOB_ID" in os.environ
    strategy = GraphPipeStrategy(num_microbatches=2, timeout=60.0, cache=False)
    keep = ModelCheckpoint(folder / "kept", every_n_train_steps=3, save_last=True)
    with quiet(), _bells_inside(bell):
        trainer = pl.Trainer(
            **(devices(num_ranks) if num_ranks > 1 else {"accelerator": "cpu", "devices": 1}),
            strategy=strategy if num_ranks > 1 else "auto",
            plugins=[SLURMEnvironment(auto_requeue=True)] if is_slurm else None,
            max_steps=NUM_STEPS,
            callbacks=[Bells(bell), keep, OnExceptionCheckpoint(folder)],
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, data, DataLoader(data.dataset, 24), ckpt_path=checkpoint)
    if trainer.is_global_zero:
        torch.save(module.state_dict(), folder / "trained.pt")


def _forked(
    folder: Path, bell: Bell, num_ranks: int, *, slurm: bool = False, checkpoint: Path | None = None
) -> list[int]:
    """Trains in forked processes; how each ended (-1: not in time)."""
    port = str(free_port())
    pids: list[int] = []
    for rank in range(num_ranks):
        pid = os.fork()
        if pid:
            pids.append(pid)
            with contextlib.suppress(OSError):
                os.setpgid(pid, pids[0])
            continue
        code = 1
        try:
            os.setpgid(0, pids[0] if pids else 0)
            number, count = str(rank), str(num_ranks)
            os.environ.update(MASTER, MASTER_PORT=port)
            if slurm:
                os.environ.update(SLURM, SLURM_NTASKS=count, SLURM_NTASKS_PER_NODE=count)
                os.environ.update(SLURM_PROCID=number, SLURM_LOCALID=number)
            elif num_ranks > 1:
                own = {"RANK": number, "LOCAL_RANK": number, "GROUP_RANK": "0"}
                os.environ.update(own, WORLD_SIZE=count, LOCAL_WORLD_SIZE=count)
                os.environ["TORCHELASTIC_RUN_ID"] = "interrupts"
            with (folder / f"rank{rank}.txt").open("w") as said:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
            train(folder, bell, num_ranks, checkpoint)
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return _ends(pids)


def _ends(pids: list[int]) -> list[int]:
    end, codes = time.monotonic() + LIMIT_S, dict[int, int]()
    while len(codes) < len(pids) and time.monotonic() < end:
        for pid in pids:
            ended, status = (0, 0) if pid in codes else os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    for pid in pids:
        if pid not in codes:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [codes.get(pid, -1) for pid in pids]


@dataclass(frozen=True)
class Interrupted:
    """What an interrupted training left.

    Attributes:
        codes: how its processes ended.
        rung: whether it came to the point.
        step: of its newest checkpoint; None where there is none.
        off: relative difference of the weights that one device trains to from there.
        said: by its processes.
    """

    codes: list[int]
    rung: bool
    step: int | None
    off: float | None
    said: str = field(repr=False)


def interrupted(name: str, point: str, num_ranks: int, expected: dict[str, Tensor]) -> Interrupted:
    """Interrupts a training, and goes on from what it left on one device."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        (folder / "scontrol").write_text("#!/bin/sh\n")
        (folder / "scontrol").chmod(0o755)
        os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
        bell = Bell(point, SIGNALS[name], folder)
        codes = _forked(folder, bell, num_ranks, slurm=name == "usr1")
        found = [*folder.glob("hpc_*.ckpt")]
        if name != "usr1":  # where it is one of many, as the run goes on
            found = [*folder.glob("*.ckpt"), *(folder / "kept").glob("*.ckpt")]
        newest = max(found, key=lambda each: each.stat().st_mtime_ns, default=None)
        rung, step, off = (folder / "rung").exists(), None, None
        said = [path.read_text()[-3000:] for path in sorted(folder.glob("rank*.txt"))]
        if newest is not None:
            # Not onto a GPU: none may be in use where ranks are forked.
            step = torch.load(newest, "cpu", weights_only=False)["global_step"]
            again = folder / "again"
            again.mkdir()
            _forked(again, Bell("", None, again), 1, checkpoint=newest)
            weights = torch.load(again / "trained.pt", "cpu")
            off = max(
                float((weights[n] - w).abs().max() / w.abs().max()) for n, w in expected.items()
            )
        return Interrupted(codes, rung, step, off, "\n---\n".join(said))


def main(wanted: list[str]) -> int:
    """Prints what differs from one device; how many cases do."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has none
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        _forked(folder, Bell("", None, folder), 1)
        expected = torch.load(folder / "trained.pt")
    wrong = 0
    for name in SIGNALS:
        for point in POINTS:
            case = f"{name}:{point}"
            if wanted and not any(each in case for each in wanted):
                continue
            one = interrupted(name, OURS_ALONE.get(point, point), 1, expected)
            two = interrupted(name, point, 2, expected)
            # SIGTERM ends a run whose first step takes too long
            least = 0 if name == "term" and point in IN_FIRST_STEP else one.step or 0
            is_right = two.rung and {*one.codes} == {*two.codes} and -1 not in two.codes
            if case != "usr1:train_end":  # a run that is over does not go back into the queue
                is_right &= (one.step is None) == (two.step is None)
                is_right &= (two.step or 0) >= least
            is_right &= (two.off or 0.0) < 1e-9
            wrong += not is_right
            sys.stdout.write(f"{'ok' if is_right else 'WRONG'} {case}\n  {one}\n  {two}\n")
            sys.stdout.write("" if is_right else f"{two.said}\n")
            sys.stdout.flush()
    return wrong


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))
