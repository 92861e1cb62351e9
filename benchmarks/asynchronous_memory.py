"""Memory of asynchronous pipelines: measured peak of every rank beside the predicted one.

A chain of equal layers with Adam is cut into as many stages as there are processes. In every
process a mode of torch reads, before and after every operator of every step, how many bytes glibc
has handed out as memory of their own; tensors of more than ``LEAST`` are asked to be among them,
whoever makes them. To these come the messages that lie in memory shared with others and have not
been let go by this process. So the peak is a count, which does not depend on what other processes
do or what the allocator keeps; what an operator holds only while it runs is not in it. Bytes that
were there before training and are no parameters (libraries) are left out. The rank of the loss
also holds what is not the pipeline's: the batches that are read ahead, and the user's step on
every one of them.

    python benchmarks/asynchronous_memory.py                     # four processes, all policies
    python benchmarks/asynchronous_memory.py --policies stash --optimizer momentum
    python benchmarks/asynchronous_memory.py --policies stash --accumulate 4
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import platform
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

from lightning_gpp import GraphPipeStrategy
from lightning_gpp.planner import evaluate_plan
from lightning_gpp.runtime.transport.shared_slots import SlotMemory
from lightning_gpp.text_table import text_table
from lightning_gpp.weights.policies import POLICIES

WIDTH, LAYERS, BATCH = 512, 8, 768
LEAST = 2**16
"""Bytes of the smallest tensors that are counted."""

OPTIMIZERS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, 1e-4),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, 1e-4),
}


class _MallInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc; ``hblkhd`` counts blocks of memory of their own."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


class Counter(TorchDispatchMode):
    """Counts while it is active.

    Attributes:
        most: bytes at the peak since it was last set.
    """

    def __init__(self) -> None:
        super().__init__()
        libc = ctypes.CDLL(None)
        assert libc.mallopt(-4, 2**20) == 1, "M_MMAP_MAX is not to be set"
        self._read = libc.mallinfo2
        self._read.restype = _MallInfo
        self.most = 0
        self.blocks: Callable[[], list[SlotMemory]] = list

    def now(self) -> int:
        """Bytes that are handed out, and those of messages that are here."""
        messages = sum(
            block.shape.slot_bytes * (not block.is_free(index))
            for block in self.blocks()
            for index in range(block.shape.num_slots)
            if block.shape.slot_bytes >= LEAST
        )
        return int(self._read().hblkhd) + messages

    def note(self) -> None:
        """Takes a look."""
        self.most = max(self.most, self.now())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """An operator runs."""
        self.note()
        result = func(*args, **(kwargs or {}))
        self.note()
        return result


class Chain(pl.LightningModule):
    """Equal layers."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.optimizer = optimizer

    def forward(self, x: Tensor) -> Tensor:
        """All layers, one after the other."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """A mean over samples."""
        return self(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The one of the run."""
        return OPTIMIZERS[self.optimizer](self.parameters())


class Memory(pl.Callback):
    """Every rank writes its peak into a folder; rank 0 also what is predicted for all of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.others = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Counting begins."""
        self.counter = Counter()
        held = sum(p.untyped_storage().nbytes() for p in pl_module.parameters() if not p.is_meta)
        self.others = self.counter.now() - held
        transport = trainer.strategy._session.run.transport  # type: ignore[union-attr]
        self.counter.blocks = lambda: [b for p in transport._peers.values() for b in p.blocks]
        self.counter.__enter__()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """The first step, in which the model is planned, does not count."""
        if trainer.global_step <= 1:
            self.counter.most = 0

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes the files."""
        self.counter.__exit__(None, None, None)
        most = self.counter.most - self.others
        (self.folder / str(trainer.global_rank)).write_text(str(most), encoding="ascii")
        if trainer.is_global_zero:
            pipeline = trainer.strategy._session.run.pipeline  # type: ignore[union-attr]
            planned = pipeline.planned
            stages = evaluate_plan(planned.plan, planned.request).stages
            found = [
                (pipeline.rank_of_device[stage.devices[0]], asdict(judged.memory))
                for stage, judged in zip(planned.plan.stages, stages, strict=True)
            ]
            (self.folder / "predicted").write_text(json.dumps(found), encoding="ascii")


class Same(Dataset[Tensor]):
    """Samples that take no memory while they wait."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((WIDTH,), index / self.count)


def rows(
    policy: str, optimizer: str, num_devices: int, num_steps: int, per_update: int
) -> list[tuple[str, ...]]:
    """Rank by rank."""
    if POLICIES[policy].is_one_behind:
        per_update = max(per_update, num_devices - 1)
    torch.manual_seed(0)
    each = LAYERS // num_devices
    plan = [[f"layers.{i * each + j}" for j in range(each)] for i in range(num_devices)]
    with tempfile.TemporaryDirectory() as name:
        trainer = pl.Trainer(
            strategy=GraphPipeStrategy(
                plan=plan,
                start_method="spawn",
                timeout=120.0,
                schedule="1f1b-async",
                weights=policy,
            ),
            devices=num_devices,
            accelerator="cpu",
            max_epochs=1,
            accumulate_grad_batches=per_update,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Memory(Path(name))],
        )
        trainer.fit(Chain(optimizer), DataLoader(Same(num_steps * BATCH), BATCH))
        predicted = json.loads((Path(name) / "predicted").read_text(encoding="ascii"))
        found = []
        for stage, (rank, memory) in enumerate(predicted):
            taken = int((Path(name) / str(rank)).read_text(encoding="ascii"))
            total = sum(memory.values())
            mb = [f"{number / 1e6:.1f}" for number in (*memory.values(), total, taken)]
            found.append((policy, str(stage), *mb, f"{taken / total - 1:+.1%}"))
    return found


def only_counted(parser: argparse.ArgumentParser) -> None:
    """Prepares for processes whose memory is counted, and of which nothing but that is shown."""
    if sys.platform != "linux":
        parser.error("only glibc says what it has handed out")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_gpp"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(LEAST)  # of the processes that begin now


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=1, help="batches of an update")
    parser.add_argument("--policies", nargs="+", default=[*POLICIES], choices=[*POLICIES])
    parser.add_argument("--optimizer", default="adam", choices=[*OPTIMIZERS])
    options = parser.parse_args()
    only_counted(parser)
    header = ("policy", "stage", "weights", "gradients", "optimizer", "activations")
    print(
        f"{LAYERS} layers of {WIDTH}, batches of {BATCH}, {options.optimizer}, {options.devices} "
        f"processes, torch {torch.__version__}, {platform.machine()}; MB"
    )
    found = [
        row
        for policy in options.policies
        for row in rows(
            policy, options.optimizer, options.devices, options.steps, options.accumulate
        )
    ]
    print(text_table((*header, "predicted", "measured", "error"), found, left=("policy",)))


if __name__ == "__main__":
    main()
