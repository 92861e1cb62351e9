"""Counts how often the host waits for a GPU, and on which lines.

torch warns of its own waits where it is asked to (``torch.cuda.set_sync_debug_mode``): ``.item()``,
blocking copies, operators whose result has a size that depends on values. Waits that a program asks
for by name (``synchronize`` of the device, a stream or an event) are counted as they are called.
NCCL's and gloo's own waits, and operators on sparse tensors, are not seen.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

_TEXT = "called a synchronizing CUDA operation"
_OURS = f"{Path(__file__).parent}/"


class HostWaits:
    """From :meth:`start` to :meth:`stop`; nothing on a CPU, for which nobody waits.

    Args:
        device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_on = False
        self._is_gpu = device.type == "cuda"
        self._lines: Counter[tuple[bool, str]] = Counter()
        self._patched: list[tuple[Any, str, Any]] = []

    def start(self) -> None:
        """From now on they count."""
        if not self._is_gpu or self._is_on:
            return
        self._is_on = True
        warnings.filterwarnings("always", _TEXT)
        shown = warnings.showwarning

        def show(message: Any, *args: Any, **kwargs: Any) -> None:
            if _TEXT in str(message):
                self._note()
            else:
                shown(message, *args, **kwargs)

        self._patch(warnings, "showwarning", show)
        for owner in (torch.cuda, torch.accelerator, torch.cuda.Stream, torch.cuda.Event):
            self._patch(owner, "synchronize", self._counted(owner.synchronize))
        torch.cuda.set_sync_debug_mode("warn")

    def stop(self) -> None:
        """All is as it was."""
        if self._is_on:
            self._is_on = False
            torch.cuda.set_sync_debug_mode("default")
            while self._patched:
                owner, name, value = self._patched.pop()
                setattr(owner, name, value)

    def num(self, *, in_helpers: bool) -> int:
        """How many there were.

        Args:
            in_helpers: in threads beside the main one and those of autograd.
        """
        return sum(count for (helper, _), count in self._lines.items() if helper == in_helpers)

    def most_frequent(self, num: int) -> list[tuple[str, int]]:
        """Lines outside of helpers, and how often the host waited there."""
        lines = [(line, count) for (helper, line), count in self._lines.items() if not helper]
        return sorted(lines, key=lambda each: -each[1])[:num]

    def _patch(self, owner: Any, name: str, value: Any) -> None:
        self._patched.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def _counted(self, synchronize: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._note()
            return synchronize(*args, **kwargs)

        return counted

    def _note(self) -> None:
        name = threading.current_thread().name
        is_helper = not name.startswith(("MainThread", "Dummy"))  # autograd's are dummies
        self._lines[is_helper, _line()] += 1


def _line() -> str:
    """Where this thread is: its innermost line in the package, or else outside of torch."""
    frame, innermost, found = sys._getframe(1), "", ""
    while frame is not None:
        path = frame.f_code.co_filename
        place = f"{'/'.join(Path(path).parts[-2:])}:{frame.f_lineno}"
        if "/lightning_gpp/" in path:
            return place
        if not path.startswith(_OURS) and not path.endswith("/warnings.py"):
            innermost = innermost or place
            if "/torch/" not in path:
                found = found or place
        frame = frame.f_back  # type: ignore[assignment]
    return found or innermost
