"""What makes many objects, without Python's collector of reference cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Within it objects are freed by their counts alone, unless that was so before.

    A search makes millions of tuples that outlive it by nothing, and the collector looks through
    all that are kept time and again: 5 to 12 per cent of the seconds of five searches for pipelines
    on 8 to 32 devices, whose memory was the same without (at most 1 MB more), and 29 per cent of
    those of HAP's for a mixture of experts on 64. Capturing a model makes many more, none of which
    is a tensor in a cycle: 8 per cent of the processor time to the first step of a GPT-2 of 24
    layers.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
