"""What a step looks at on a GPU leaves it together: the host waits once, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.workers import WorkerPool
from torch import nn

from lightning_gpp.common.host_copies import Originals
from lightning_gpp.runtime.payload import pack
from lightning_gpp.runtime.staying_inputs import StayingInputs
from lightning_gpp.runtime.sums import GradientBucket
from lightning_gpp.strategy.cutting.cutting import combine_results
from lightning_gpp.strategy.cutting.graphs import graph_slices
from lightning_gpp.strategy.logging.logs import joined
from lightning_gpp.strategy.state.precision import AgreedScaler
from lightning_gpp.strategy.step.cut_checks import CountedEntries


def on_gpu(*values: float) -> list[torch.Tensor]:
    return [torch.full((3,), float(value), device="cuda") for value in values]


def num_waits(piece: str) -> int:
    """How often the host waits in one of the pieces below, all other work done before."""
    from standin_gpus.waits import counts

    prepare, run, check = PIECES[piece]()
    given = prepare()
    torch.accelerator.synchronize()
    counts()
    found = run(given)
    waits = sum(number for cause, number in counts().items() if cause != "(stand-in waits)")
    check(found)
    return waits


Piece = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], None]]


def expect(*values: float) -> Callable[[Any], None]:
    def check(found: Any) -> None:
        assert [t.flatten()[0].item() for t in found] == pytest.approx(values, rel=1e-4)

    return check


def trained(*gradients: float) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in on_gpu(*gradients)]
    for parameter, gradient in zip(parameters, on_gpu(*gradients), strict=True):
        parameter.grad = gradient
    return parameters


def loss_scale() -> Piece:
    scaler = AgreedScaler("cuda", init_scale=4.0, growth_interval=1)
    scaler.total = lambda number: number

    def run(parameters: list[nn.Parameter]) -> list[Any]:
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        scaled = scaler.scale(torch.ones((), device="cuda"))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return [*parameters, scaled, torch.tensor(scaler.get_scale())]

    return lambda: trained(4, 8), run, expect(-1, -2, 4, 8)


def summed_buckets() -> Piece:
    class Sum:
        def start(self, tensor: torch.Tensor, ranks: Any) -> Sum:
            tensor *= 2
            return self

        def __call__(self, timeout_s: float, purpose: str) -> None:
            """Done at once."""

    def run(parameters: list[nn.Parameter]) -> list[Any]:
        for index, parameter in enumerate(parameters):
            bucket = GradientBucket(0, (0, 1), {str(index): parameter})
            bucket.start(Sum())  # type: ignore[arg-type]
            bucket.wait(1.0, "a stage")
            assert all(bucket.had_gradient)
        return [parameter.grad for parameter in parameters]

    return lambda: trained(1, 2, 3), run, expect(2, 4, 6)


def staying_inputs() -> Piece:
    sender, names = StayingInputs(frozenset("abc")), ("a", "b", "c")
    sender.thinned(pack(on_gpu(1, 2, 3)), names, 1, 0)
    sender.begin()

    def run(tensors: list[torch.Tensor]) -> list[bool]:
        payload = sender.thinned(pack(tensors), names, 1, 0)
        return [tensor is not None for tensor in payload.tensors]

    def check(found: list[bool]) -> None:
        assert found == [False, True, False]

    return lambda: on_gpu(1, 7, 3), run, check


def results_of_microbatches() -> Piece:
    def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        results = [{"loss": tensor[0], "same": tensor[0] * 0} for tensor in tensors]
        combined = combine_results(results, [1, 2, 1])
        return [*combined.values(), joined([tensor[0] for tensor in tensors], [1, 2, 1], "mean")]

    return lambda: on_gpu(1, 2, 3), run, expect(2, 0, 2)


def batches_of_graphs() -> Piece:
    def prepare() -> dict[str, torch.Tensor]:
        found = {"x": torch.ones(5, 2), "edge_index": torch.tensor([[0, 2, 3], [1, 3, 2]])}
        found |= {"batch": torch.tensor([0, 0, 1, 1, 2]), "ptr": torch.tensor([0, 2, 4, 5])}
        return {name: tensor.cuda() for name, tensor in found.items()}

    def run(inputs: dict[str, torch.Tensor]) -> Any:
        return graph_slices(inputs, [2, 1])

    def check(found: Any) -> None:
        assert (found["x"].lengths, found["edge_index"].lengths) == ((4, 1), (3, 0))

    return prepare, run, check


def entries_of_a_batch(factor: int | None = None) -> Piece:
    """Of small batches they are counted in the host memory that these were copied from."""
    originals = Originals()

    def prepare() -> dict[str, torch.Tensor]:
        batch = {"words": torch.tensor([[5, 0, 0], [5, 6, 7], [1, 2, 5], [4, 5, 6]])}
        placed = {"words": batch["words"].cuda()}
        originals.note(batch, placed)
        if factor is not None:
            placed["words"] *= factor
        return {"words": placed["words"][:, 1:]}

    def run(batch: dict[str, torch.Tensor]) -> list[int]:
        return CountedEntries().new_pairs(originals.of(batch), [1, 1, 1, 1])

    def check(pairs: list[int]) -> None:
        assert pairs == ([0] if factor is None else [])

    return prepare, run, check


def entries_of_a_changed_batch() -> Piece:
    return entries_of_a_batch(0)


PIECES: dict[str, Callable[[], Piece]] = {
    piece.__name__: piece
    for piece in (
        *(loss_scale, summed_buckets, staying_inputs, results_of_microbatches),
        *(batches_of_graphs, entries_of_a_batch, entries_of_a_changed_batch),
    )
}
NO_WAIT = {"summed_buckets", "results_of_microbatches", "entries_of_a_batch"}


@pytest.mark.parametrize("piece", PIECES)
def test_the_host_waits_once_or_not_at_all(gpus: WorkerPool, piece: str) -> None:
    assert gpus.run(num_waits, piece, num_ranks=1) == [piece not in NO_WAIT]
