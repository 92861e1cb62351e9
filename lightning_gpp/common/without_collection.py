"""Switches Python's garbage collector off, or down, while many objects are made."""

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
    those of HAP's for a mixture of experts on 64.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # what is kept is old now, and not looked through at once
                gc.freeze()
                gc.unfreeze()
            gc.enable()


@contextmanager
def collecting_only_new() -> Iterator[None]:
    """Within it the collector looks only through objects that are made in it.

    torch, Lightning and a model are a million objects, and where many more are made, as in
    capturing a model, it looks through all of them several times: 8 per cent of the processor time
    to the first step of a GPT-2 of 24 layers. Where some objects are kept from the collector
    already, nothing changes.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
