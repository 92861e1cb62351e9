"""The default run, ``graphpipe``, beside the sum of what it consists of.

Every part is measured here, in processor time per training step:

- its *operators*: forward, loss, backward and optimizer of the recipe in a bare loop, in as many
  micro-batches as the plan has;
- *Lightning*: what a plain Trainer with the same callbacks takes beyond the operators of a batch in
  one piece, once for every rank, as each has a Trainer;
- its *messages*: their number, times what one costs sender and receiver (``transports.py``).

Printed are these, the run's own processor time, all ranks together, and the ratio. The rest is what
the strategy does besides: cutting and joining, the user's step as rank 0 leads it, programs.

    python benchmarks/default_run.py
    python benchmarks/default_run.py recipe=dlrm      # options of graphpipe
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hydra import compose, initialize_config_module
from lightning.pytorch import Callback, LightningModule, Trainer
from transports import once_us, there_and_back

from lightning_gpp.jobs.train import build_recipe, build_run
from lightning_gpp.runtime.transport.open_transport import open_transport
from lightning_gpp.runtime.transport.shared_memory_transport import SharedMemoryTransport

NUM_WARMUP, NUM_STEPS = 40, 240


class Watch(Callback):
    """Notes on every rank what steps take and how many messages they send, and leaves it in a file.

    Args:
        folder: for the files.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.ends: list[tuple[float, float, int]] = []
        self.num_sent = 0
        self.num_microbatches = 1

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Counts messages from now on."""
        send = SharedMemoryTransport.send

        def counted(*args: Any, **kwargs: Any) -> None:
            self.num_sent += 1
            send(*args, **kwargs)

        SharedMemoryTransport.send = counted  # type: ignore[method-assign]

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """A step is over."""
        self.ends.append((time.perf_counter(), time.process_time(), self.num_sent))
        plan = getattr(trainer.strategy, "plan", None)
        self.num_microbatches = 1 if plan is None else plan.num_microbatches

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Leaves the medians."""
        ends = self.ends[NUM_WARMUP:]
        steps = [[b - a for a, b in zip(one, two)] for one, two in zip(ends, ends[1:])]
        medians = [statistics.median(column) for column in zip(*steps)]
        torch.save([*medians, self.num_microbatches], Path(self.folder, f"{trainer.global_rank}"))


def trained(options: list[str]) -> list[list[float]]:
    """Of every rank: wall-clock and processor seconds, messages sent of a step, micro-batches."""
    with tempfile.TemporaryDirectory() as folder:
        fixed = ["trainer.enable_progress_bar=false", f"+trainer.max_steps={NUM_STEPS}"]
        with initialize_config_module("lightning_gpp.configs", version_base=None):
            asked = [*options, *fixed, "trainer.max_epochs=-1", f"paths.output_dir={folder}"]
            config = compose("config", asked)
        trainer, module, data = build_run(config, [Watch(folder)])
        trainer.fit(module, datamodule=data)
        count = int(config.trainer.devices)
        return [torch.load(Path(folder, str(rank)), weights_only=False) for rank in range(count)]


def operators_s(options: list[str], num_microbatches: int) -> float:
    """Processor seconds of a step in a bare loop, its forward in so many micro-batches."""
    with initialize_config_module("lightning_gpp.configs", version_base=None):
        module, data = build_recipe(compose("config", options))
    data.prepare_data()
    data.setup("fit")
    module.log = lambda *_, **__: None
    module.optimizers = lambda: None
    whole = module.forward

    def forward(views: Any) -> Any:
        names = list(views)
        parts = zip(*(views[name].chunk(num_microbatches) for name in names), strict=True)
        return torch.cat([whole(dict(zip(names, part, strict=True))) for part in parts])

    module.forward = forward
    found = module.configure_optimizers()
    optimizer = found["optimizer"] if isinstance(found, dict) else found
    seconds: list[float] = []
    while len(seconds) < NUM_STEPS:
        for index, batch in enumerate(data.train_dataloader()):
            start_s = time.process_time()
            module.training_step(batch, index).backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.process_time() - start_s)
    return statistics.median(seconds[NUM_WARMUP:])


def message(rank: int, folder: str) -> None:
    """One of two processes: leaves the processor seconds that a message costs both ends."""
    torch.set_num_threads(1)
    method = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2)
    transport, tensor = open_transport(torch.device("cpu"), 60.0), torch.ones(2048)
    _, cpu_us = once_us(lambda: there_and_back(transport, tensor), rounds=500)
    torch.save(2e-6 * cpu_us, Path(folder, f"{rank}"))
    transport.close()


def message_s() -> float:
    """Processor seconds that a message of 8 kB costs sender and receiver together."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(message, (folder,), nprocs=2)
        found: float = torch.load(Path(folder, "0"), weights_only=False)
        return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("options", nargs="*", help="of graphpipe")
    options = parser.parse_args().options
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    ranks = trained(options)
    num_microbatches = int(ranks[0][3])
    plain_s = trained([*options, "strategy=single_device", "trainer.devices=1"])[0][1]
    in_pieces_s, whole_s = operators_s(options, num_microbatches), operators_s(options, 1)
    num_messages, each_s = sum(rank[2] for rank in ranks), message_s()
    loops_s = len(ranks) * max(0.0, plain_s - whole_s)
    parts_s = in_pieces_s + loops_s + num_messages * each_s
    took_s = sum(rank[1] for rank in ranks)
    rows = {
        "operators in micro-batches": in_pieces_s,
        f"Lightning, of {len(ranks)} ranks": loops_s,
        f"{num_messages:.0f} messages of {1e6 * each_s:.0f} us": num_messages * each_s,
        "together": parts_s,
        "the run": took_s,
        "operators in one piece": whole_s,
        "plain Lightning": plain_s,
        "the run, wall-clock": ranks[0][0],
    }
    print(f"{len(ranks)} ranks, {num_microbatches} micro-batches; milliseconds a step:")
    for name, seconds in rows.items():
        print(f"  {name:<28} {1e3 * seconds:7.2f}")
    own = ", ".join(f"{1e3 * rank[1]:.2f}" for rank in ranks)
    print(f"  the run takes {took_s / parts_s:.2f} times its parts (its ranks {own})")


if __name__ == "__main__":
    main()
