"""Ranks that hold the same stages of several pipelines, as threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_gpp.runtime.processes import peers as peers_module
from lightning_gpp.runtime.processes.peers import Peers
from lightning_gpp.runtime.transport.transport import TransportError
from lightning_gpp.strategy.state.averaged_gradients import average_gradients

pytestmark = pytest.mark.timeout(60)


def on_pipelines(number: int, function: Callable[[Peers], Any], timeout_s: float = 20) -> list[Any]:
    """What a function returns, or raises, on every one of the peers."""
    store, found = dist.HashStore(), [None] * number
    joined: list[Peers] = []  # who leaves early is missed at once

    def run(pipeline: int) -> None:
        try:
            peers = Peers(store, pipeline, number, timeout_s)
            joined.append(peers)
            found[pipeline] = function(peers)
        except Exception as error:
            found[pipeline] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(each,)) for each in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("bucket_bytes", [1, 40, 2**20])
def test_means_of_tensors_of_several_types(
    bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "_BUCKET_BYTES", bucket_bytes)

    def mean(peers: Peers) -> list[torch.Tensor]:
        mine = float(peers.pipeline)
        tensors = [
            torch.full((3, 2), mine, dtype=torch.float64),
            torch.full((2,), 2 * mine, dtype=torch.bfloat16),
            torch.full((4, 4), mine)[:, ::2],
            torch.tensor(4 * mine, dtype=torch.float64),
        ]
        peers.mean_(tensors, "averaging")
        return tensors

    for tensors in on_pipelines(3, mean):
        values = [tensor.unique().tolist() for tensor in tensors]
        assert values == [[1.0], [2.0], [1.0], [4.0]]


def test_objects_and_values() -> None:
    def talk(peers: Peers) -> Any:
        mine = peers.pipeline
        value = torch.full((2,), float(mine), dtype=torch.float64)
        flag = torch.tensor(mine == 0)
        peers.spread([value, flag], "spreading")
        peers.meet("meeting")
        return (
            peers.share({"of": mine}, "sharing", root=1),
            peers.gather(mine, "gathering"),
            int(peers.reduced(torch.tensor(mine), dist.ReduceOp.MAX, "reducing")),
            value.tolist(),
            bool(flag),
        )

    assert on_pipelines(2, talk) == 2 * [({"of": 1}, [0, 1], 1, [0.0, 0.0], True)]


def test_a_peer_that_does_not_come() -> None:
    def meet(peers: Peers) -> None:
        if peers.pipeline == 0:
            peers.meet("averaging gradients")

    late, _ = on_pipelines(2, meet, timeout_s=0.5)
    assert isinstance(late, TransportError)
    assert "averaging gradients" in str(late) and "within 0.5 s" in str(late)


def test_a_wait_ends_with_the_error_of_this_pipeline() -> None:
    def meet(peers: Peers) -> None:
        if peers.pipeline == 0:
            threading.Timer(0.2, peers.abort, [ValueError("rank 1 failed")]).start()
            peers.meet("averaging gradients")

    aborted, _ = on_pipelines(2, meet)
    assert isinstance(aborted, ValueError)


def test_gradients_that_are_not_there_in_every_pipeline() -> None:
    """Missing in one they count as zeros, as in DDP; missing in all there is none."""

    def average(peers: Peers) -> Any:
        some, none, frozen = (nn.Parameter(torch.ones(2)) for _ in range(3))
        frozen.requires_grad_(False)
        if peers.pipeline == 1:
            some.grad = torch.full((2,), 3.0)
        ends = average_gradients([some, none, frozen], peers, is_asked_to_end=peers.pipeline == 0)
        assert some.grad is not None
        return some.grad.tolist(), none.grad, frozen.grad, ends

    assert on_pipelines(2, average) == 2 * [([1.5, 1.5], None, None, True)]


def test_sparse_gradients_are_refused() -> None:
    def average(peers: Peers) -> None:
        table = nn.Embedding(3, 2, sparse=True)
        table(torch.tensor([1])).sum().backward()
        average_gradients(table.parameters(), peers, is_asked_to_end=False)

    for error in on_pipelines(2, average):
        assert isinstance(error, NotImplementedError) and "sparse=False" in str(error)
