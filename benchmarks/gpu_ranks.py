"""What ``benchmarks/gpu.py`` measures, as one of the ranks.

Trainings take forty steps. Ten warm up, some of which are recorded; twenty are timed in blocks of
five (only the end of a block waits for the device, so that a host that runs ahead may); in ten the
waits of the host are counted: those that torch warns of where it is asked to
(``torch.cuda.set_sync_debug_mode``), and those that a program asks for by name (``synchronize``).
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import statistics
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from measuring import quiet, trainer
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.utils.data import DataLoader

from lightning_gpp import GraphPipeStrategy, HAPStrategy, TimelineCallback
from lightning_gpp.cluster.device_kind import DEVICE_KINDS
from lightning_gpp.planner import evaluate_plan
from lightning_gpp.planner.plan.by_rank import by_rank
from lightning_gpp.runtime.payload import pack
from lightning_gpp.runtime.transport.process_transport import ProcessTransport
from lightning_gpp.strategy.spmd.planners import measure_speeds

WARM_UP, BLOCK, NUM_BLOCKS, WATCHED = 10, 5, 4, 10
RECORDED = (4, 6, 8)
MICROBATCHES = 4
TIMEOUT_S = 100.0
TARGETS = 16
_TAG = (0, 0, 0, 0)
_UNDER_WAY_BYTES = 256 << 20


@dataclass(frozen=True)
class Place:
    """Processes in which cases are measured.

    Attributes:
        name: of it.
        devices: of the processes, as torch calls them.
        accelerator: of the Trainer.
        is_plain: whether there is one process, which nobody tells that it is a rank.
    """

    name: str
    devices: tuple[str, ...]
    accelerator: str
    is_plain: bool = False

    @property
    def rank(self) -> int:
        """Of this process."""
        return 0 if self.is_plain else int(os.environ["RANK"])


@dataclass(frozen=True)
class Case:
    """What is measured there.

    Attributes:
        name: of it.
        measure: the function that does, as ``module:name``; it is called with the place, the case
            and a folder of the place's own, and returns something that JSON can write.
        options: for it.
    """

    name: str
    measure: str
    options: Mapping[str, Any] = field(default_factory=dict)


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


def join(place: Place) -> None:
    """Connects the processes of a place, as the strategies do."""
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if place.accelerator == "gpu" else "gloo")


class _Pair:
    """Two ranks of which the first sends.

    Args:
        transport: between them.
    """

    def __init__(self, transport: ProcessTransport) -> None:
        self.is_sender = transport.rank == 0
        self._transport = transport
        self._hosts = dist.new_group(backend="gloo")

    def send(self, tensor: Tensor) -> None:
        """Rank 0."""
        self._transport.send(pack([tensor]), target=1, tag=_TAG)

    def receive(self) -> None:
        """Rank 1."""
        self._transport.receive(source=0, tag=_TAG, timeout_s=TIMEOUT_S, purpose="benchmark")

    def meet(self) -> None:
        """Both hosts are here; their devices may be anywhere."""
        dist.barrier(self._hosts)

    def flush(self) -> None:
        """What was sent is on its way."""
        self._transport.flush()

    def finish(self, device: torch.device) -> None:
        """Messages are over on hosts and devices of both."""
        self.flush()
        wait(device)
        self.meet()

    def send_often(self, tensor: Tensor, num: int) -> None:
        """Messages in a row, to their end."""
        for _ in range(num):
            self.send(tensor) if self.is_sender else self.receive()
        self.finish(tensor.device)


@contextmanager
def _connected(place: Place, device: torch.device) -> Iterator[_Pair]:
    join(place)
    transport = ProcessTransport(device, None, TIMEOUT_S)
    yield _Pair(transport)
    transport.close()


def messages(place: Place, case: Case, folder: Path) -> dict[str, Any]:
    """Messages per second from rank 0 to rank 1; the option ``sizes_bytes``."""
    device, per_s = own_device(place), {}
    with _connected(place, device) as pair:
        for size_bytes in case.options["sizes_bytes"]:
            tensor = torch.ones(size_bytes // 4, device=device)
            num, rounds = max(1, min(100, _UNDER_WAY_BYTES // size_bytes)), 5
            pair.send_often(tensor, num)
            start_s = time.perf_counter()
            for _ in range(rounds):
                pair.send_often(tensor, num)
            per_s[str(size_bytes)] = rounds * num / (time.perf_counter() - start_s)
    return per_s


def overlap(place: Place, case: Case, folder: Path) -> dict[str, Any]:
    """Whether messages wait for compute that they have nothing to do with, and it for them.

    The option ``side`` is that of the matrices that keep a device busy for a second. Seconds:

    - ``send_s``: rank 0 sends what its device has yet to compute;
    - ``other_work_s``: rank 1, to which that message is announced, adds to a vector and reads it;
    - ``message_s``: rank 0 sends data that is there, and its device is done with it, while rank
      1's device is busy with something else.
    """
    device = own_device(place)
    matrix = torch.randn(case.options["side"], case.options["side"], device=device)
    matrix /= case.options["side"]
    vector = torch.ones(1 << 16, device=device)  # more than travels inside of an announcement

    def work(num: int) -> Tensor:
        found = matrix
        for _ in range(num):
            found = found @ matrix
        return found

    def seconds(num: int) -> float:
        wait(device)
        start_s = time.perf_counter()
        work(num)
        wait(device)
        return time.perf_counter() - start_s

    with _connected(place, device) as pair:
        pair.send_often(vector, 10)  # connects
        (vector + 1).sum().item()
        for is_turn in (pair.is_sender, not pair.is_sender):  # both may be on one device
            if is_turn:
                seconds(2)
                num = max(2, min(500, round(2 / seconds(2))))  # a device queues a thousand
                alone_s = seconds(num)
            pair.meet()

        if pair.is_sender:
            late = work(num).flatten()[: vector.numel()]
        start_s = time.perf_counter()
        if pair.is_sender:
            pair.send(late)
        send_s = time.perf_counter() - start_s
        pair.meet()
        time.sleep(0.1)  # it may be on its way to the thread that listens
        start_s = time.perf_counter()
        (vector + 1).sum().item()
        other_work_s = time.perf_counter() - start_s
        if not pair.is_sender:
            pair.receive()
        pair.finish(device)

        if not pair.is_sender:
            work(num)
        pair.meet()
        start_s = time.perf_counter()
        if pair.is_sender:
            pair.send(vector)
            pair.flush()
            wait(device)
        message_s = time.perf_counter() - start_s
        if not pair.is_sender:
            pair.receive()
        pair.finish(device)
    return {
        "alone_s": alone_s,
        "send_s": send_s,
        "other_work_s": other_work_s,
        "message_s": message_s,
    }


def speeds(place: Place, case: Case, folder: Path) -> dict[str, Any]:
    """What ``hap`` takes this device for, what large work shows of it, and its data sheet.

    The option ``side`` is that of the large matrices.
    """
    device = own_device(place)
    found = measure_speeds(device)
    side = case.options["side"]
    one, other = torch.randn(side, side, device=device), torch.empty(side, side, device=device)
    flops_per_s = 2 * side**3 / _once_s(lambda: torch.mm(one, one, out=other), device)
    bytes_per_s = 2 * one.nbytes / _once_s(lambda: other.copy_(one), device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    sheet = DEVICE_KINDS.get(name)
    return {
        "hap": [float(found.flops_per_s[0]), float(found.memory_bytes_per_s[0])],
        "launch_s": float(found.launch_s[0]),
        "large": [flops_per_s, bytes_per_s],
        "sheet": sheet and [sheet.peak_flops_per_s["float32"], sheet.peak_memory_bytes_per_s],
    }


def _once_s(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of something, of ten in a row."""
    for is_warm in (False, True):
        wait(device)
        start_s = time.perf_counter()
        for _ in range(10 if is_warm else 2):
            work()
        wait(device)
    return (time.perf_counter() - start_s) / 10


def as_rank(here: Path) -> None:
    """This process is one of a place; it ends at once where a case fails, and so do the others."""
    task = json.loads((here / "task.json").read_text())
    place = Place(**{**task["place"], "devices": tuple(task["place"]["devices"])})
    for each in task["cases"]:
        case = Case(**each)
        module, _, name = case.measure.partition(":")
        try:
            found = getattr(importlib.import_module(module), name)(place, case, here.parent)
        except BaseException as error:
            lines = str(error).strip().splitlines() or [""]
            told = {
                "summary": f"rank {place.rank}: {type(error).__name__}: {lines[0]}",
                "text": traceback.format_exc(),
            }
            _write(here / f"{place.rank}.error", told)
            sys.stdout.flush()
            os._exit(1)  # what waits for other ranks shall not keep this one
        _write(here / f"{case.name}.{place.rank}.json", found)


def _write(path: Path, found: dict[str, Any]) -> None:
    """Whole or not at all."""
    path.with_suffix(".part").write_text(json.dumps(found))
    path.with_suffix(".part").rename(path)


if __name__ == "__main__":
    as_rank(Path(sys.argv[1]))
