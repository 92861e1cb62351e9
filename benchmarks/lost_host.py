"""How long training stands still when ``torchrun`` loses a host, and where the time goes.

Two hosts with two ranks each train on processes of this machine. In step 20 the second host is
lost: its agent and its ranks are killed or, with ``--cut``, the link between two network namespaces
is (which takes root). The ranks of the first host end with an error, ``torchrun`` starts them
again, and they go on from the last checkpoint as two ranks with a plan of their own.

    python benchmarks/lost_host.py
    sudo python benchmarks/lost_host.py --cut

The seconds are of the wall clock, from the loss to the end of the first step after it.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ["BENCHMARK_BEGIN"] = str(time.time())

import lightning.pytorch as pl
import measuring
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

LOST_STEP, NUM_STEPS, EVERY = 20, 40, 8
PHASES = (
    ("lost", "noticed", "the other ranks notice"),
    ("noticed", "failed", "they end with an error"),
    ("failed", "begin", "torchrun notices, and hosts meet again"),
    ("begin", "imported", "imports of Python"),
    ("imported", "setup", "the Trainer; ranks connect"),
    ("setup", "batch", "checkpoint read, data loader"),
    ("batch", "stepped", "capture, plan, weights placed; the first step"),
)
MEETING = "last_call_timeout=2,keep_alive_interval=2,keep_alive_max_attempt=3"
"""torchrun's own limits, 30, 5 and 3: how long hosts wait for others that may come, and how often
a host is silent before it counts as lost."""
LINK = ("lost0", "lost1")
ADDRESSES = ("10.78.0.1", "10.78.0.2")


class Net(pl.LightningModule):
    """Twelve layers of a transformer, 6.3 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.TransformerEncoderLayer(256, 4, 512, 0.0, batch_first=True) for _ in range(12))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (samples, tokens, 256), as its result."""
        return self.layers(x)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Its output is to be its input."""
        return (self(batch[0]) - batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """With two moments of each parameter, which checkpoints hold as well."""
        return torch.optim.Adam(self.parameters())


class Notes(pl.Callback):
    """When what happens on rank 0, and the loss of a host.

    Args:
        folder: takes a file for every event: ``0-step``, with the seconds, of the first start.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.start = 0 if not (folder / "lost").exists() else 1

    def note(self, event: str, seconds: float | None = None) -> None:
        """Only what comes first counts."""
        path = self.folder / f"{self.start}-{event}"
        if os.environ["RANK"] == "0" and not path.exists():
            path.write_text(str(time.time() if seconds is None else seconds))

    def setup(self, *_: Any, **__: Any) -> None:
        """The ranks are connected."""
        self.note("setup")

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Before the first one the checkpoint has been read; in a later one a host is lost."""
        self.note("batch")
        is_lost = self.start == 0 and trainer.global_step == LOST_STEP
        if is_lost and os.environ["GROUP_RANK"] == "1":
            mark = self.folder / "lost"
            if not mark.exists():
                mark.write_text(str(time.time()))
            if os.environ["BENCHMARK_CUT"] == "0":
                os.kill(os.getppid(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)

    def on_exception(self, *_: Any) -> None:
        """The step ends with an error."""
        self.note("noticed")

    def on_train_batch_end(self, *_: Any) -> None:
        """Of the first one, and all."""
        self.note("stepped")


def train(folder: Path) -> None:
    """What every rank does."""
    measuring.quiet()
    notes = Notes(folder)
    notes.note("begin", float(os.environ["BENCHMARK_BEGIN"]))
    notes.note("imported")
    pl.seed_everything(0)
    kept = ModelCheckpoint(folder / "kept", save_last=True, every_n_train_steps=EVERY)
    trainer = measuring.trainer(
        "graphpipe",
        int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_steps=NUM_STEPS,
        max_epochs=-1,
        enable_checkpointing=True,
        callbacks=[notes, kept],
    )
    data = DataLoader(TensorDataset(torch.randn(640, 32, 256)), 32)
    try:
        trainer.fit(Net(), data, ckpt_path="last")
    except BaseException:
        notes.note("failed")
        raise
    if trainer.is_global_zero:
        print(f"trained to step {trainer.global_step} on {trainer.world_size} ranks")


def agents(folder: Path, is_cut: bool) -> list[subprocess.Popen[bytes]]:
    """``torchrun`` of two hosts, the first of which stays."""
    settings = {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "LIGHTNING_GPP_CACHE": str(folder / "cache"),
        "BENCHMARK_CUT": str(int(is_cut)),
    }
    found = []
    for host, name in enumerate(LINK):
        address = ADDRESSES[0] if is_cut else "127.0.0.1"
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2"]
        command += ["--nproc-per-node=2", "--max-restarts=2", "--rdzv-backend=c10d"]
        command += ["--rdzv-id=job", f"--rdzv-endpoint={address}:29477"]
        command += [f"--rdzv-conf=is_host={1 - host},{MEETING}"]
        if is_cut:
            command = ["ip", "netns", "exec", name, *command, f"--local-addr={ADDRESSES[host]}"]
            settings["GLOO_SOCKET_IFNAME"] = name
        command += [__file__, "--rank", str(folder)]
        errors = (folder / f"host{host}.txt").open("wb")
        found.append(subprocess.Popen(command, env=os.environ | settings, stderr=errors))
    return found


def ip(*arguments: str) -> None:
    """The command of that name."""
    subprocess.run(["ip", *arguments], check=True)


def link(stack: ExitStack) -> None:
    """Two network namespaces with a link between them, until the stack is left."""
    for name in LINK:
        ip("netns", "add", name)
        stack.callback(ip, "netns", "del", name)
    ip(
        "link",
        "add",
        LINK[0],
        "netns",
        LINK[0],
        "type",
        "veth",
        "peer",
        "name",
        LINK[1],
        "netns",
        LINK[1],
    )
    for name, address in zip(LINK, ADDRESSES, strict=True):
        ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
        for each in ("lo", name):
            ip("-n", name, "link", "set", each, "up")


def measure(folder: Path, is_cut: bool, limit_s: float) -> None:
    """Prints the phases."""
    hosts = agents(folder, is_cut)
    try:
        end = time.time() + limit_s
        while is_cut and not (folder / "lost").exists() and time.time() < end:
            time.sleep(0.02)
        if is_cut:
            ip("-n", LINK[0], "link", "set", LINK[0], "down")
        code = hosts[0].wait(max(1.0, end - time.time()))
    finally:
        for host in hosts:
            host.kill()
    if code:
        raise SystemExit((folder / "host0.txt").read_text()[-4000:])
    names = {path.name: path for path in folder.iterdir()}
    starts = {"lost": "lost", "noticed": "0-noticed", "failed": "0-failed"}
    times = {
        event: float(names[starts.get(event, f"1-{event}")].read_text())
        for event in dict.fromkeys(e for phase in PHASES for e in phase[:2])
    }
    for before, after, what in PHASES:
        print(f"{times[after] - times[before]:7.1f} s  {what}")
    in_all_s = times["stepped"] - times["lost"]
    print(f"{in_all_s:7.1f} s  in all; {LOST_STEP % EVERY} steps are run again")


def main() -> None:
    """Measures; with ``--rank`` it is one of the ranks that are measured."""
    options = measuring.parser(__doc__)
    options.add_argument("--cut", action="store_true", help="the link, with root's rights")
    options.add_argument("--limit-s", type=float, default=300.0)
    options.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.rank is not None:
        train(arguments.rank)
        return
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if arguments.cut:
            link(stack)
        measure(Path(folder), arguments.cut, arguments.limit_s)


if __name__ == "__main__":
    main()
