"""Ranks that hold the same stages of several pipelines, as threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from lightning_gpp.runtime.processes.peers import Peers


def on_pipelines(number: int, function: Callable[[Peers], Any], timeout_s: float = 99) -> list[Any]:
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
