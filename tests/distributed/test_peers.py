"""Ranks that hold the same stages of several pipelines, as threads of this process."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.pipelines import on_pipelines

from lightning_gpp.runtime.processes import peers as peers_module
from lightning_gpp.runtime.processes.peers import Peers
from lightning_gpp.runtime.waits import TransportError


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
            threading.Timer(0.2, peers.waits.abort, [ValueError("rank 1 failed")]).start()
            peers.meet("averaging gradients")

    aborted, _ = on_pipelines(2, meet)
    assert isinstance(aborted, ValueError)
