"""Ranks that are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from lightning_gpp.runtime.waits import Waits

T = TypeVar("T")


def of_ranks(num_ranks: int, function: Callable[[int], T], waits: Iterable[Waits] = ()) -> list[T]:
    """What a function returns on each of some threads.

    Args:
        num_ranks: how many; each is named by its rank.
        function: of a rank.
        waits: those that the first error of any rank ends, which is raised.
    """
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(rank)
        except BaseException as error:
            errors.append(error)
            for each in waits:
                each.abort(error)

    threads = [threading.Thread(target=run, args=(i,), name=str(i)) for i in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(num_ranks)]
