"""What a GPU has to show, in one table: equality, costs, messages, memory, predictions.

Needs one GPU and the installed package, nothing else, and takes a few minutes. Every row comes from
runs in processes of their own: plain Lightning on one device, this strategy with one stage, and
with two stages in two processes on the same device (``accelerator="pool"``; NCCL refuses two ranks
on one GPU, so their messages are staged through pinned memory of the host). Two stages on one
device cannot be faster than one by more than they overlap; the row says what a second process and
the staging cost.

    python benchmarks/gpu.py                  # the first GPU; without one: a line, and status 1
    python benchmarks/gpu.py --device cpu     # the same rows on CPUs, to try the script itself
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gpp import GraphPipeStrategy, TimelineCallback
from lightning_gpp.planner import evaluate_plan
from lightning_gpp.runtime.payload import pack
from lightning_gpp.runtime.transport.open_transport import open_transport
from lightning_gpp.text_table import text_table
from lightning_gpp.units_of_measure import bytes_text, seconds_text

LIMIT_S = 120.0
"""Of one run; all of them together stay below eight minutes."""

WARM_UP = 9
"""Steps that count for no time: memory and kernels settle, and steps 3 to 7 are recorded."""

MESSAGE_BYTES = (4 << 10, 1 << 20)


@dataclass(frozen=True)
class Run:
    """What runs in processes of its own.

    Attributes:
        name: of its folder.
        ranks: processes; 0 trains with plain Lightning.
        precision: of the Trainer.
        device: ``cuda:0`` or ``cpu``.
        width: features of every layer.
        blocks: layers of the model.
        batch: samples of a mini-batch.
        steps: that are trained.
        sends: whether messages are measured, and nothing is trained.
    """

    name: str
    ranks: int
    precision: str
    device: str
    width: int
    blocks: int
    batch: int
    steps: int
    sends: bool = False


class Blocks(pl.LightningModule):
    """Residual layers that are not small for a GPU."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of a batch."""
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """The loss of a batch."""
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Notes(pl.Callback):
    """Losses, when steps ended, and the memory of this process."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.ends_s: list[float] = []
        self.predicted_bytes: list[int] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Notes a step."""
        self.losses.append(float(trainer.callback_metrics["loss"]))  # waits for the device
        self.ends_s.append(time.perf_counter())
        strategy = trainer.strategy
        if isinstance(strategy, GraphPipeStrategy) and not self.predicted_bytes:
            planned = strategy.session.run.built.planned
            if planned is not None:
                found = evaluate_plan(planned.plan, planned.request)
                self.predicted_bytes = [device.memory_bytes for device in found.devices]

    def step_s(self) -> float:
        """The median step, the first ones left out."""
        ends = self.ends_s[WARM_UP:]
        return statistics.median(b - a for a, b in zip(ends, ends[1:]))


def train(run: Run, folder: Path) -> dict[str, Any]:
    """Trains as this process's rank; what was seen."""
    notes = Notes()
    is_gpu = run.device != "cpu"
    recorded = TimelineCallback(dirpath=folder / "recorded", picture=False, trace=False, page=False)
    options: dict[str, Any] = {
        "max_steps": run.steps,
        "max_epochs": -1,
        "precision": run.precision,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [notes] if run.ranks == 0 else [notes, recorded],
    }
    if run.ranks == 0:
        options |= {"accelerator": "gpu" if is_gpu else "cpu", "devices": 1}
    else:
        options |= {
            "accelerator": "pool",
            "devices": ",".join([run.device] * run.ranks),
            "strategy": GraphPipeStrategy(
                num_microbatches=1 if run.ranks == 1 else 4,
                planner="balanced",
                cache=False,
                timeout=LIMIT_S,
            ),
        }
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4 * run.batch, run.width, generator=generator)
    samples = [
        [a, b] for a, b in zip(x.split(run.batch), x[:, :16].sin().split(run.batch), strict=True)
    ]
    module = Blocks(run.width, run.blocks)
    trainer = pl.Trainer(**options)
    trainer.fit(module, DataLoader(samples, batch_size=None))  # type: ignore[arg-type]
    if trainer.global_rank == 0:
        torch.save(module.cpu().state_dict(), folder / "weights.pt")
    report = next(iter(recorded.reports.values()), None)
    step = next(iter(recorded.timelines.values()), None)
    return {
        "losses": notes.losses,
        "step_s": notes.step_s(),
        "predicted_bytes": notes.predicted_bytes,
        "peak_bytes": torch.cuda.max_memory_allocated() if is_gpu else None,
        "recorded_s": None if step is None else step.step_s,
        "predicted_s": None if report is None else report.predicted.step_s,
    }


def send(run: Run) -> dict[str, Any]:
    """Messages per second from rank 0 to rank 1, by their size."""
    dist.init_process_group("gloo", "env://")
    device = torch.device(run.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    transport, tag = open_transport(device, LIMIT_S), (0, 0, 0, 0)
    found = {}
    for size in MESSAGE_BYTES:
        tensor = torch.ones(size // 4, device=device)
        rounds = 20 * run.steps if size == MESSAGE_BYTES[0] else 4 * run.steps
        for is_warm in (False, True):
            dist.barrier()
            start_s = time.perf_counter()
            for _ in range(rounds if is_warm else WARM_UP):
                if transport.rank == 0:
                    transport.send(pack([tensor]), target=1, tag=tag)
                else:
                    transport.receive(source=0, tag=tag, timeout_s=LIMIT_S, purpose="benchmark")
            transport.flush()
            dist.barrier()
            found[str(size)] = rounds / (time.perf_counter() - start_s)
    transport.close()
    dist.destroy_process_group()
    return found


def as_rank(run: Run, folder: Path) -> None:
    """This process is one of the ranks of a run, or plain Lightning."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if run.device == "cpu":
        torch.set_num_threads(1)
    found = send(run) if run.sends else train(run, folder)
    (folder / f"{os.environ.get('RANK', 0)}.json").write_text(json.dumps(found))


class RunFailedError(RuntimeError):
    """A run did not end as it should; the text has the end of what its processes wrote."""


def results(run: Run, folder: Path) -> list[dict[str, Any]]:
    """Runs in processes of its own; what every rank saw."""
    folder = folder / run.name
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(asdict(run)))
    with _processes(run, folder) as processes:
        deadline_s = time.monotonic() + LIMIT_S
        for process in processes:
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise RunFailedError(f"{run.name}: not done after {LIMIT_S:.0f} s") from None
    if any(process.returncode for process in processes):
        texts = [path.read_text()[-2000:] for path in sorted(folder.glob("*.log"))]
        raise RunFailedError("\n".join([f"{run.name} failed:", *texts]))
    return [json.loads(path.read_text()) for path in sorted(folder.glob("[0-9].json"))]


@contextmanager
def _processes(run: Run, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes of a run, which do not outlive the body."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    try:
        for rank in range(max(1, run.ranks)):
            environment = dict(os.environ)
            if run.ranks:
                environment |= {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "GROUP_RANK": "0",
                    "WORLD_SIZE": str(run.ranks),
                    "LOCAL_WORLD_SIZE": str(run.ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "TORCHELASTIC_RUN_ID": "benchmark",
                }
            with (folder / f"{rank}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, __file__, "--rank-of", str(folder)],
                        env=environment,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def rows(base: Run, folder: Path) -> Iterator[list[str]]:
    """What was found: the row's name, the value, what it is compared with."""

    def run(name: str, ranks: int, precision: str = "32-true") -> list[dict[str, Any]]:
        return results(
            Run(**{**asdict(base), "name": name, "ranks": ranks, "precision": precision}), folder
        )

    (plain,), (one,), two = run("plain", 0), run("one", 1), run("two", 2)
    (plain_half,), half = run("plain-bf16", 0, "bf16-mixed"), run("two-bf16", 2, "bf16-mixed")
    (sent, _) = results(Run(**{**asdict(base), "name": "sends", "ranks": 2, "sends": True}), folder)

    for name, precision, found, other in (
        ("two", "float32", two[0], plain),
        ("two-bf16", "bf16-mixed", half[0], plain_half),
    ):
        weights = _difference(folder / name, folder / ("plain" + name.removeprefix("two")))
        loss = max(abs(a - b) for a, b in zip(found["losses"], other["losses"], strict=True))
        value = f"weights {weights:.1e}, losses {loss:.1e}"
        yield [f"two stages, {precision}: largest difference", value, "of plain Lightning"]
    for name, found, by, what in (
        ("one stage", one, plain, "plain Lightning"),
        ("two stages on one device", two[0], one, "one stage"),
        ("plain Lightning, bf16-mixed", plain_half, plain, "the same in float32"),
        ("two stages, bf16-mixed", half[0], two[0], "the same in float32"),
    ):
        value = f"{seconds_text(found['step_s'])} ({found['step_s'] / by['step_s']:.2f} ×)"
        yield [f"step, {name}", value, f"{what}: {seconds_text(by['step_s'])}"]
    for size in MESSAGE_BYTES:
        value = f"{sent[str(size)]:,.0f} per second"
        rate = bytes_text(round(sent[str(size)] * size))
        yield [f"messages of {bytes_text(size)}", value, f"{rate} per second"]
    for name, ranks in (("float32", two), ("bf16-mixed", half)):
        for rank, each in enumerate(ranks):
            seen = each["peak_bytes"]
            value = "not measured on CPUs" if seen is None else bytes_text(seen)
            predicted = bytes_text(ranks[0]["predicted_bytes"][rank])
            yield [f"memory of rank {rank}, {name}", value, f"predicted: {predicted}"]
    for name, each in (("float32", two[0]), ("bf16-mixed", half[0])):
        if each["recorded_s"] is None or each["predicted_s"] is None:
            raise RunFailedError(f"no step of two stages was recorded and predicted ({name})")
        ratio = each["predicted_s"] / each["recorded_s"]
        value = seconds_text(each["recorded_s"])
        predicted = f"predicted: {seconds_text(each['predicted_s'])} ({ratio:.2f} ×)"
        yield [f"recorded step of two stages, {name}", value, predicted]


def _difference(one: Path, other: Path) -> float:
    """The largest of two trainings' weights, relative to the largest weight of its tensor."""
    ours, theirs = (torch.load(path / "weights.pt", weights_only=True) for path in (one, other))
    return max(
        float((ours[name] - weight).abs().max() / weight.abs().max())
        for name, weight in theirs.items()
    )


def main(given: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--width", type=int, help="features of every layer")
    parser.add_argument("--steps", type=int, default=30, help="at least 14")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.rank_of is not None:
        as_rank(Run(**json.loads((arguments.rank_of / "run.json").read_text())), arguments.rank_of)
        return 0
    is_gpu = arguments.device == "cuda"
    if is_gpu and not torch.cuda.is_available():
        print("There is no GPU here; --device cpu tries the same rows on CPUs.")
        return 1
    if arguments.steps < WARM_UP + 5:
        parser.error(f"the first {WARM_UP} warm up and are recorded: --steps {WARM_UP + 5} or more")
    base = Run(
        name="",
        ranks=0,
        precision="32-true",
        device="cuda:0" if is_gpu else "cpu",
        width=arguments.width or (1024 if is_gpu else 128),
        blocks=12 if is_gpu else 6,
        batch=4096 if is_gpu else 256,
        steps=arguments.steps,
    )
    device = torch.cuda.get_device_name(0) if is_gpu else "CPUs (which say nothing of GPUs)"
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = list(rows(base, Path(folder)))
        except RunFailedError as error:
            print(error)
            return 1
    print(
        f"{device}, torch {torch.__version__}; {base.blocks} layers of {base.width} features, "
        f"batches of {base.batch}, {base.steps} steps; {time.monotonic() - start_s:.0f} s in all\n"
    )
    print(text_table(["", "found", "beside"], found, left=["", "beside"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
