"""What libraries do differently for tracers, switched on while a forward is captured.

``transformers`` leaves an attention mask away when no token of the batch is padding, because
attention is faster without. That decision reads the data: a graph captured on a batch without
padding would refuse the first batch with padding. For tracers transformers always builds the mask
(``transformers.masking_utils.is_tracing``), which computes the same for every batch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def uncompiled() -> Iterator[None]:
    """Modules that were compiled run as they are written: torch's compiler traces by itself."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def tracing_announced() -> Iterator[None]:
    """Tells libraries that are loaded that the body is being traced."""
    masking: Any = sys.modules.get("transformers.masking_utils")
    original = getattr(masking, "is_tracing", None)
    if original is None:
        yield
        return
    masking.is_tracing = lambda *args, **kwargs: True
    try:
        yield
    finally:
        masking.is_tracing = original
