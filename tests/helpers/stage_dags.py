"""Random stage graphs, and toy stages that compute on them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_gpp.graph import FEED, StageEdge, StageGraph
from lightning_gpp.runtime.executor import ActionRecord, Executor
from lightning_gpp.runtime.stage_run import StageCode
from lightning_gpp.runtime.thread_transport import ThreadHub
from lightning_gpp.schedule import Program


@st.composite
def stage_graphs(draw: st.DrawFn, max_stages: int = 6) -> StageGraph:
    """Connected stage DAGs; stage i makes the value ``v<i>``, sources read the feed's ``x``."""
    num_stages = draw(st.integers(1, max_stages))
    pairs: set[tuple[int, int]] = set()
    for target in range(1, num_stages):
        sources = draw(st.sets(st.integers(FEED, target - 1), min_size=1, max_size=3))
        pairs |= {(source, target) for source in sources}
    pairs.add((FEED, 0))
    for stage in range(num_stages - 1):
        if not any(source == stage for source, _ in pairs):
            pairs.add((stage, num_stages - 1))
    return edges_to_graph(num_stages, pairs)


def edges_to_graph(num_stages: int, pairs: set[tuple[int, int]]) -> StageGraph:
    """A stage graph with one value per producing stage."""
    edges = tuple(
        StageEdge(source, target, ("x",) if source == FEED else (f"v{source}",))
        for source, target in sorted(pairs)
    )
    return StageGraph(num_stages, edges)


class ToyStages:
    """Stage i computes ``tanh(linear_i(sum of its inputs))``; the loss is the mean square."""

    def __init__(self, stages: StageGraph, width: int = 3, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.stages = stages
        self.weights = [
            nn.Parameter(torch.randn(width, width, generator=generator, dtype=torch.float64))
            for _ in range(stages.num_stages)
        ]

    def function(self, stage: int) -> Callable[..., Sequence[Any]]:
        """The stage as a function of its values."""

        def run(values: Sequence[Tensor], *, training: bool) -> Sequence[Tensor]:
            return [torch.tanh(torch.stack(list(values)).sum(0) @ self.weights[stage])]

        return run

    def code(self, stage: int) -> StageCode:
        """The stage for the executor."""
        inputs = tuple(v for e in self.stages.edges if e.target == stage for v in e.values)
        return StageCode(self.function(stage), inputs, (f"v{stage}",))

    def loss(self, x: Tensor) -> Tensor:
        """The whole model's loss on one device."""
        values = {"x": x}
        for stage in range(self.stages.num_stages):
            code = self.code(stage)
            (values[f"v{stage}"],) = code.function([values[n] for n in code.inputs], training=True)
        return values[f"v{self.stages.num_stages - 1}"].square().mean()


class ToyBoundary:
    """Feeds slices of ``x`` and takes the mean square of the last stage's value."""

    def __init__(self, x: Tensor, sizes: Sequence[int], last: int) -> None:
        self.parts = x.split(list(sizes))
        self.total = x.shape[0]
        self.value = f"v{last}"
        self.losses: list[float] = []

    def start(self, microbatch: int) -> dict[str, Tensor]:
        return {"x": self.parts[microbatch]}

    def finish(self, microbatch: int, outputs: dict[str, Any]) -> Tensor:
        loss = outputs[self.value].square().mean() * len(self.parts[microbatch]) / self.total
        self.losses.append(loss.item())
        return loss


def run_on_threads(
    program: Program,
    toy: ToyStages,
    x: Tensor,
    unit_sizes: Sequence[int],
    on_record: Callable[[int, ActionRecord], None] | None = None,
) -> ToyBoundary:
    """Runs a program with one thread per device; raises the first error of any."""
    num_devices = 1 + max(program.devices)
    hub = ThreadHub(num_devices)
    pace = program.multiples[-1]
    sizes = [sum(unit_sizes[i : i + pace]) for i in range(0, len(unit_sizes), pace)]
    boundary = ToyBoundary(x, sizes, program.loss_stage)
    errors: list[BaseException] = []

    def work(device: int) -> None:
        executor = Executor(
            transport=hub.transport(device),
            rank_of_device=tuple(range(num_devices)),
            stages={s: toy.code(s) for s, home in enumerate(program.devices) if home == device},
            output_names=(f"v{program.loss_stage}",),
            batch_dims={name: (0,) for edge in program.edges for name in edge.values},
            timeout_s=20,
            on_record=None if on_record is None else lambda record: on_record(device, record),
        )
        leads = device == program.devices[-1]
        try:
            executor.run(program, unit_sizes, training=True, boundary=boundary if leads else None)
        except BaseException as error:
            errors.append(error)
            for mailbox in hub.mailboxes:
                mailbox.fail(error)

    threads = [threading.Thread(target=work, args=(d,)) for d in range(num_devices)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return boundary
