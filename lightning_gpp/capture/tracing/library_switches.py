"""What libraries do differently for tracers, switched on while a forward is captured.

``transformers`` leaves an attention mask away when no token of the batch is padding, because
attention is faster without. That decision reads the data: a graph captured on a batch without
padding would refuse the first batch with padding. For tracers transformers always builds the mask
(``is_tracing``), which computes the same for every batch; nor does it look for padding to warn of.
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
    names = ("transformers.masking_utils", "transformers.modeling_utils")
    loaded: list[Any] = [sys.modules.get(name) for name in names]
    asking = [module for module in loaded if hasattr(module, "is_tracing")]
    originals = [module.is_tracing for module in asking]
    for module in asking:
        module.is_tracing = lambda *args, **kwargs: True
    try:
        yield
    finally:
        for module, original in zip(asking, originals):
            module.is_tracing = original
