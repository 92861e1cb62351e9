"""What ``benchmarks/gpu.py`` measures, and where."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Key = tuple[str, str]
"""Names of a place and of a case."""

PLAIN, ONE, POOL, TWO = "plain Lightning", "one stage", "two stages, staged", "two stages, NCCL"
PAIRS = (POOL, TWO)
LINKS = {POOL: "between ranks, staged", TWO: "between ranks, NCCL"}
FLOAT32 = "float32"
MICROBATCHES = 4
WATCHED = 10
"""Steps in which the waits of the host are counted."""

PRECISIONS = {FLOAT32: "32-true", "bf16": "bf16-mixed"}


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


def places(is_gpu: bool) -> dict[str, Place]:
    """Where cases are measured."""
    one, two, kind = ("cuda:0", "cuda:1", "gpu") if is_gpu else ("cpu", "cpu", "cpu")
    pool, both = ((one, one), "pool"), ((one, two), kind)
    return {
        PLAIN: Place(PLAIN, (one,), kind, is_plain=True),
        ONE: Place(ONE, (one,), kind),
        LINKS[POOL]: Place(LINKS[POOL], *pool),
        POOL: Place(POOL, *pool),
        LINKS[TWO]: Place(LINKS[TWO], *both),
        TWO: Place(TWO, *both),
    }


def cases(large: tuple[int, int], small: tuple[int, int]) -> dict[Key, Case]:
    """All that can be measured.

    Args:
        large: width of the layers and samples of a batch of which a step keeps a device busy.
        small: of which it does not.
    """
    found: dict[Key, Case] = {}

    def add(place: str, name: str, measure: str, **options: Any) -> None:
        found[place, name] = Case(name, measure, options)

    def add_training(place: str, name: str, size: tuple[int, int], **options: Any) -> None:
        given = {"blocks": 12, "precision": "32-true", "width": size[0], "batch": size[1]}
        add(place, name, "gpu_trainings:train", **{**given, **options})

    two = {"num_microbatches": MICROBATCHES}
    strategies = {PLAIN: None, ONE: {"num_microbatches": 1}, POOL: two, TWO: two}
    for place, strategy in strategies.items():
        for name, precision in PRECISIONS.items():
            weights = {"keeps": name} if place == PLAIN else {"compares": name}
            if place == PLAIN and name != FLOAT32:
                weights["compares"] = FLOAT32
            given: dict[str, Any] = {"precision": precision, "strategy": strategy, **weights}
            add_training(place, f"large {name}", large, **given)
        add_training(place, "small", small, strategy=strategy)
    for place in PAIRS:
        given = {"compares": FLOAT32}
        add_training(place, "1f1b", large, strategy={**two, "schedule": "1f1b"}, **given)
        add_training(place, "hap", large, strategy="hap", **given)
        asynchronous = {"num_microbatches": 1, "schedule": "1f1b-async"}
        add_training(place, "async", large, strategy=asynchronous)
        few = (large[0], 4 * MICROBATCHES)
        add_training(place, "few samples", few, strategy=two, has_checkpoint=True)
        sizes_bytes = (4 << 10, 1 << 20, 64 << 20)
        add(LINKS[place], "messages", "gpu_links:messages", sizes_bytes=sizes_bytes)
        add(LINKS[place], "overlap", "gpu_links:overlap", side=2 * large[0])
    for size, name, precision in (
        (large, f"large {FLOAT32}", "32-true"),
        (large, "large bf16", "bf16-mixed"),
        (small, "small", "32-true"),
    ):
        for schedule in ("gpipe", "1f1b"):
            given = {"precision": precision, "schedule": schedule}
            given |= {"width": size[0], "batch": size[1], "blocks": 12}
            add(LINKS[TWO], f"{name} {schedule}", "gpu_trainings:torch_pipeline", **given)
    for place, strategy in strategies.items():
        given = {"precision": "bf16-true", "strategy": strategy, "blocks": 4}
        given["positions"] = max(16, large[1] // 8)
        add_training(place, "flash", (max(64, large[0] // 4), 4 * MICROBATCHES), **given)
    add(PLAIN, "speeds", "gpu_devices:speeds", side=2 * large[0])
    return found
