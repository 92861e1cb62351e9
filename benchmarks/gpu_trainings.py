"""Trainings that ``benchmarks/gpu.py`` measures, as one of the ranks.

Trainings take forty steps. Ten warm up, some of which are recorded; twenty are timed in blocks of
five (only the end of a block waits for the device, so that a host that runs ahead may); in ten the
waits of the host are counted: those that torch warns of where it is asked to
(``torch.cuda.set_sync_debug_mode``), and those that a program asks for by name (``synchronize``).
"""

from __future__ import annotations

import gc
import statistics
import threading
import time
import traceback
import warnings
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from gpu_cases import MICROBATCHES, WATCHED, Case, Place
from gpu_devices import join, own_device, wait
from measuring import trainer
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.utils.data import DataLoader

from lightning_gpp import GraphPipeStrategy, HAPStrategy, TimelineCallback
from lightning_gpp.planner import evaluate_plan
from lightning_gpp.planner.plan.by_rank import by_rank

WARM_UP, BLOCK, NUM_BLOCKS = 10, 5, 4
RECORDED = (4, 6, 8)
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
        notes: takes the peak of the first forward, in which the model is captured and divided.
    """

    def __init__(self, body: nn.Sequential, notes: Notes) -> None:
        super().__init__()
        self.body, self.notes = body, notes

    def forward(self, x: Tensor) -> Tensor:
        """Scores of a batch."""
        y: Tensor = self.body(x)
        return y

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """The loss of a batch."""
        x, y = batch
        scores = self(x)
        if "first forward" not in self.notes.peaks:
            self.notes.note("first forward")
        loss = nn.functional.mse_loss(scores.float(), y.float())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Momentum."""
        return torch.optim.SGD(self.parameters(), lr=rate(self.body), momentum=0.9)


class Notes(pl.Callback):
    """Losses, times, waits, and peaks of a GPU's memory above what was there before.

    Args:
        device: of this rank.
        checkpoint: written at the end, to see what memory that takes.
    """

    def __init__(self, device: torch.device, checkpoint: Path | None) -> None:
        self._is_gpu, self.checkpoint = device.type == "cuda", checkpoint
        self.losses: list[Tensor] = []
        self.predicted_bytes: list[int] = []
        self.peaks: dict[str, int] = {}
        self.blocks, self.waits = Blocks(device), HostWaits()
        gc.collect()
        self.start()
        self._before_bytes = torch.cuda.memory_allocated() if self._is_gpu else 0

    def start(self) -> None:
        """A new peak of memory begins."""
        if self._is_gpu:
            torch.cuda.reset_peak_memory_stats()

    def note(self, name: str, *, is_now: bool = False) -> None:
        """Keeps the peak since the last start, or what is there now."""
        if self._is_gpu:
            look = torch.cuda.memory_allocated if is_now else torch.cuda.max_memory_allocated
            self.peaks[name] = look() - self._before_bytes

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """After a step."""
        if trainer.global_rank == 0:
            self.losses.append(trainer.callback_metrics["loss"].clone())
        self.blocks.step_ends()
        if self.blocks.num_steps == WARM_UP:
            self.start()
        if self.blocks.are_over and self._is_gpu:
            self.waits.start()

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        """While all is still where it was trained."""
        self.waits.stop()
        self.note("steps")
        strategy = trainer.strategy
        if isinstance(strategy, GraphPipeStrategy) and not isinstance(strategy, HAPStrategy):
            planned = strategy.session.run.built.planned
            if planned is not None:
                found = evaluate_plan(*by_rank(planned.plan, planned.request))
                self.predicted_bytes = [device.memory_bytes for device in found.devices]
        if self.checkpoint is not None:
            self.start()
            self.note("before the checkpoint", is_now=True)
            trainer.save_checkpoint(self.checkpoint)
            self.note("checkpoint")


class HostWaits:
    """Where the host waits for a GPU, from :meth:`start` to :meth:`stop`."""

    _TEXT = "called a synchronizing CUDA operation"

    def __init__(self) -> None:
        self.lines: Counter[str] = Counter()
        self._patched: list[tuple[Any, str, Any]] = []

    def start(self) -> None:
        """From now on they count."""
        if self._patched:
            return
        warnings.filterwarnings("always", self._TEXT)
        shown = warnings.showwarning

        def show(message: Any, *args: Any, **kwargs: Any) -> None:
            self._note() if self._TEXT in str(message) else shown(message, *args, **kwargs)

        def counted(synchronize: Any) -> Any:
            def noted(*args: Any, **kwargs: Any) -> Any:
                self._note()
                return synchronize(*args, **kwargs)

            return noted

        self._patch(warnings, "showwarning", show)
        for owner in (torch.cuda, torch.accelerator, torch.cuda.Stream, torch.cuda.Event):
            self._patch(owner, "synchronize", counted(owner.synchronize))
        torch.cuda.set_sync_debug_mode("warn")

    def stop(self) -> None:
        """All is as it was."""
        if self._patched:
            torch.cuda.set_sync_debug_mode("default")
        while self._patched:
            setattr(*self._patched.pop())

    def _patch(self, owner: Any, name: str, value: Any) -> None:
        self._patched.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def _note(self) -> None:
        """The innermost line in the package; threads that help, beside autograd's, do not count."""
        if threading.current_thread().name.startswith(("MainThread", "Dummy")):
            frames = [*traceback.extract_stack()][::-1]
            ours = (each for each in frames if "/lightning_gpp/" in each.filename)
            line = next(ours, frames[-1])
            self.lines[f"{'/'.join(Path(line.filename).parts[-2:])}:{line.lineno}"] += 1


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


def train(place: Place, case: Case, folder: Path) -> dict[str, Any]:
    """Trains under a Trainer.

    The options of the case: ``width``, ``blocks``, ``batch``, ``precision``; ``strategy``: options
    of :class:`GraphPipeStrategy`, ``"hap"`` or None; ``positions`` of attention, which is there
    instead of residual layers then; ``has_checkpoint``: whether one is written; ``keeps``: a name
    for the weights at the end; ``compares``: the name of those to compare them with.
    """
    given, device = case.options, own_device(place)
    notes = Notes(device, folder / "last.ckpt" if given.get("has_checkpoint") else None)
    callbacks: list[pl.Callback] = [notes]
    recorded = TimelineCallback(RECORDED, folder, picture=False, page=False)
    strategy = given.get("strategy")
    if isinstance(strategy, dict) and "schedule" not in strategy:
        callbacks.append(recorded)
    module = Module(layers(given, device), notes)
    trainer(
        **_placed(place, strategy),
        max_steps=WARM_UP + BLOCK * NUM_BLOCKS + WATCHED,
        max_epochs=-1,
        precision=given["precision"],
        callbacks=callbacks,
    ).fit(module, DataLoader(_samples(given, device), batch_size=None))
    steps = sorted(recorded.reports, key=lambda step: recorded.timelines[step].step_s)
    typical = steps[len(steps) // 2] if steps else None
    return {
        "step_s": notes.blocks.step_s(),
        "losses": [float(loss) for loss in notes.losses],
        "difference": _difference(place, module, folder.parent, given),
        "peaks": notes.peaks,
        "predicted_bytes": notes.predicted_bytes,
        "model_bytes": sum(each.nbytes for each in module.parameters()),
        "num_waits": notes.waits.lines.total(),
        "waits_at": notes.waits.lines.most_common(3),
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
