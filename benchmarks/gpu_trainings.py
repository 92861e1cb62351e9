"""The trainings of ``benchmarks/gpu.py``, as one of their ranks.

Of forty steps ten warm up, some of which are recorded; twenty are timed in blocks of five (only the
end of a block waits for the device, so that a host that runs ahead may); in ten the waits of the
host are counted.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from gpu_processes import Case, Place
from gpu_waits import HostWaits
from measuring import quiet, trainer
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.utils.data import DataLoader

from lightning_gpp import GraphPipeStrategy, HAPStrategy, TimelineCallback
from lightning_gpp.planner import evaluate_plan
from lightning_gpp.planner.plan.by_rank import by_rank

WARM_UP, BLOCK, NUM_BLOCKS, WATCHED = 10, 5, 4, 10
RECORDED = (4, 6, 8)
MICROBATCHES = 4
TIMEOUT_S = 100.0
TARGETS = 16


class Residual(nn.Module):
    """A layer and what goes around it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, width)`` to the same."""
        y: Tensor = x + self.layer(x)
        return y


class Attention(nn.Module):
    """Causal attention; on a GPU by a kernel that no CPU has.

    Args:
        width: of all heads together.
        is_gpu: whether that kernel is called.
    """

    def __init__(self, width: int, *, is_gpu: bool) -> None:
        super().__init__()
        self.heads, self.is_gpu = width // 64, is_gpu
        self.norm = nn.LayerNorm(width)
        self.inputs, self.outputs = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, positions, width)`` to the same."""
        batch, positions, width = x.shape
        parts = self.inputs(self.norm(x)).view(batch, positions, 3, self.heads, 64)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind()
        if self.is_gpu:
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            y = flash(query, key, value, 0.0, True)[0]
        else:
            y = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        joined: Tensor = self.outputs(y.transpose(1, 2).reshape(batch, positions, width))
        return x + joined


def layers(given: Any, device: torch.device) -> nn.Sequential:
    """The model of a case; its weights are the same on every rank."""
    torch.manual_seed(0)
    width = given["width"]
    blocks: list[nn.Module] = [
        Attention(width, is_gpu=device.type == "cuda") if "positions" in given else Residual(width)
        for _ in range(given["blocks"])
    ]
    return nn.Sequential(*blocks, nn.Linear(width, TARGETS))


def rate(body: nn.Sequential) -> float:
    """The learning rate: wide heads take large steps, and what diverges cannot be compared."""
    head = body[-1]
    assert isinstance(head, nn.Linear)
    return 0.4 / head.in_features


class Module(pl.LightningModule):
    """The model as a user writes it.

    Args:
        body: the model.
        memory: takes the peak of the first forward, in which the model is captured and divided.
    """

    def __init__(self, body: nn.Sequential, memory: Memory) -> None:
        super().__init__()
        self.body = body
        self.memory = memory

    def forward(self, x: Tensor) -> Tensor:
        """Scores of a batch."""
        y: Tensor = self.body(x)
        return y

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """The loss of a batch."""
        x, y = batch
        scores = self(x)
        if "first forward" not in self.memory.peaks:
            self.memory.note("first forward")
        loss = nn.functional.mse_loss(scores.float(), y.float())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Momentum."""
        return torch.optim.SGD(self.parameters(), lr=rate(self.body), momentum=0.9)


class Memory:
    """Peaks of a GPU's memory in this process, above what was there before; none of a CPU.

    Args:
        device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self.peaks: dict[str, int] = {}
        gc.collect()
        self.start()
        self._before_bytes = torch.cuda.memory_allocated() if self._is_gpu else 0

    def start(self) -> None:
        """A new peak begins."""
        if self._is_gpu:
            torch.cuda.reset_peak_memory_stats()

    def note(self, name: str) -> None:
        """Keeps the peak since the last start."""
        if self._is_gpu:
            self.peaks[name] = torch.cuda.max_memory_allocated() - self._before_bytes

    def note_now(self, name: str) -> None:
        """What is there now."""
        if self._is_gpu:
            self.peaks[name] = torch.cuda.memory_allocated() - self._before_bytes


class Notes(pl.Callback):
    """Losses, times, memory and waits of this rank.

    Args:
        device: of this rank.
        memory: of it.
        checkpoint: written at the end, to see what memory that takes.
    """

    def __init__(self, device: torch.device, memory: Memory, checkpoint: Path | None) -> None:
        self.device, self.memory, self.checkpoint = device, memory, checkpoint
        self.losses: list[Tensor] = []
        self.predicted_bytes: list[int] = []
        self.blocks = Blocks(device)
        self.waits = HostWaits(device)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """After a step."""
        if trainer.global_rank == 0:
            self.losses.append(trainer.callback_metrics["loss"].clone())
        self.blocks.step_ends()
        if self.blocks.num_steps == WARM_UP:
            self.memory.start()
        if self.blocks.are_over:
            self.waits.start()

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        """While all is still where it was trained."""
        self.waits.stop()
        self.memory.note("steps")
        strategy = trainer.strategy
        if isinstance(strategy, GraphPipeStrategy) and not isinstance(strategy, HAPStrategy):
            planned = strategy.session.run.built.planned
            if planned is not None:
                found = evaluate_plan(*by_rank(planned.plan, planned.request))
                self.predicted_bytes = [device.memory_bytes for device in found.devices]
        if self.checkpoint is not None:
            self.memory.start()
            self.memory.note_now("before the checkpoint")
            trainer.save_checkpoint(self.checkpoint)
            self.memory.note("checkpoint")


class Blocks:
    """Times blocks of steps.

    Args:
        device: waited for at the ends of blocks.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_steps = 0
        self._device = device
        self._ends_s: list[float] = []

    def step_ends(self) -> None:
        """Counts a step."""
        self.num_steps += 1
        timed = self.num_steps - WARM_UP
        if 0 <= timed <= BLOCK * NUM_BLOCKS and timed % BLOCK == 0:
            wait(self._device)
            self._ends_s.append(time.perf_counter())

    @property
    def are_over(self) -> bool:
        """Whether all are timed."""
        return len(self._ends_s) > NUM_BLOCKS

    def step_s(self) -> float:
        """A step of the median block."""
        ends_s = self._ends_s
        return statistics.median(b - a for a, b in zip(ends_s, ends_s[1:])) / BLOCK


def wait(device: torch.device) -> None:
    """Until a device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def own_device(place: Place) -> torch.device:
    """Of this process, which has it to itself as far as threads go, and says only errors."""
    quiet()
    device = torch.device(place.devices[place.rank])
    if device.type == "cuda":
        torch.set_num_threads(os.cpu_count() or 1)
        torch.cuda.set_device(device)
    return device


def train(place: Place, case: Case, folder: Path) -> dict[str, Any]:
    """Trains under a Trainer.

    The options of the case: ``width``, ``blocks``, ``batch``, ``precision``; ``strategy``: options
    of :class:`GraphPipeStrategy`, ``"hap"`` or None; ``positions`` of attention, which is there
    instead of residual layers then; ``has_checkpoint``: whether one is written; ``keeps``: a name
    for the weights at the end; ``compares``: the name of those to compare them with.
    """
    given, device = case.options, own_device(place)
    memory = Memory(device)
    notes = Notes(device, memory, folder / "last.ckpt" if given.get("has_checkpoint") else None)
    callbacks: list[pl.Callback] = [notes]
    recorded = TimelineCallback(RECORDED, folder, picture=False, trace=False, page=False)
    strategy = given.get("strategy")
    if isinstance(strategy, dict) and "schedule" not in strategy:
        callbacks.append(recorded)
    module = Module(layers(given, device), memory)
    trainer(
        **_placed(place, strategy),
        max_steps=WARM_UP + BLOCK * NUM_BLOCKS + WATCHED,
        max_epochs=-1,
        precision=given["precision"],
        callbacks=callbacks,
    ).fit(module, DataLoader(_samples(given, device), batch_size=None))  # type: ignore[arg-type]
    steps = sorted(recorded.reports, key=lambda step: recorded.timelines[step].step_s)
    typical = steps[len(steps) // 2] if steps else None
    return {
        "step_s": notes.blocks.step_s(),
        "losses": [float(loss) for loss in notes.losses],
        "difference": _difference(place, module, folder.parent, given),
        "peaks": memory.peaks,
        "predicted_bytes": notes.predicted_bytes,
        "model_bytes": sum(each.nbytes for each in module.parameters()),
        "num_waits": notes.waits.num(in_helpers=False),
        "num_waits_in_helpers": notes.waits.num(in_helpers=True),
        "waits_at": notes.waits.most_frequent(3),
        "recorded_s": None if typical is None else recorded.timelines[typical].step_s,
        "predicted_s": None if typical is None else recorded.reports[typical].predicted.step_s,
    }


def _placed(place: Place, strategy: dict[str, Any] | str | None) -> dict[str, Any]:
    """Where and with which strategy a Trainer trains."""
    is_pool = place.accelerator == "pool"
    options: dict[str, Any] = {
        "accelerator": place.accelerator,
        "devices": ",".join(place.devices) if is_pool else len(place.devices),
        "strategy": "auto",
    }
    if strategy == "hap":
        options["strategy"] = HAPStrategy(cache=False, timeout=TIMEOUT_S)
    elif isinstance(strategy, dict):
        options["strategy"] = GraphPipeStrategy(
            **strategy, planner="balanced", cache=False, timeout=TIMEOUT_S
        )
    return options


def _samples(given: Any, device: torch.device) -> list[list[Tensor]]:
    """Four batches; those for a GPU are pinned, as a loader can do it."""
    generator = torch.Generator().manual_seed(1)
    between = (given["positions"],) if "positions" in given else ()
    batches = []
    for _ in range(4):
        x = torch.randn(given["batch"], *between, given["width"], generator=generator)
        pair = [x, x[..., :TARGETS].sin()]
        batches.append([each.pin_memory() for each in pair] if device.type == "cuda" else pair)
    return batches


def _difference(place: Place, module: nn.Module, folder: Path, given: Any) -> float | None:
    """The largest one to other weights, relative to the largest weight of its tensor."""
    if place.rank:
        return None
    ours = module.cpu().state_dict()
    if "keeps" in given:
        torch.save(ours, folder / f"{given['keeps']}.pt")
    if "compares" not in given:
        return None
    theirs = torch.load(folder / f"{given['compares']}.pt", weights_only=True)
    return max(
        float((ours[name] - weight).abs().max() / weight.abs().max())
        for name, weight in theirs.items()
    )


def torch_pipeline(place: Place, case: Case, folder: Path) -> dict[str, Any]:
    """The same layers, divided in two, under a schedule of torch's, in a bare loop.

    The options of the case: as of :func:`train`, and ``schedule``.
    """
    given, device = case.options, own_device(place)
    join(place)
    body = layers(given, device)
    half = given["blocks"] // 2
    part = (body[:half] if place.rank == 0 else body[half:]).to(device)
    stage = PipelineStage(part, place.rank, 2, device)
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[given["schedule"]]
    schedule = kind(stage, MICROBATCHES, loss_fn=_loss)
    optimizer = torch.optim.SGD(part.parameters(), lr=rate(body), momentum=0.9)
    batches, blocks = _samples(given, device), Blocks(device)
    is_mixed = given["precision"] == "bf16-mixed"
    while not blocks.are_over:
        x, y = (each.to(device, non_blocking=True) for each in batches[blocks.num_steps % 4])
        with torch.autocast(device.type, torch.bfloat16) if is_mixed else nullcontext():
            schedule.step(x) if place.rank == 0 else schedule.step(target=y)
        optimizer.step()
        optimizer.zero_grad()
        blocks.step_ends()
    return {"step_s": blocks.step_s()}


def _loss(scores: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(scores.float(), y)


def join(place: Place) -> None:
    """Connects the processes of a place, as the strategies do."""
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if place.accelerator == "gpu" else "gloo")
