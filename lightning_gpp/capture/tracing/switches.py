"""What libraries do differently while a forward is captured."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules import transformer

from lightning_gpp.capture.errors import REMEDY, CaptureError, user_location
from lightning_gpp.common.instance_attribute import replaced


@contextmanager
def uncompiled() -> Iterator[None]:
    """Modules that were compiled run as they are written: torch's compiler traces by itself."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def switched(is_recording: Callable[[], bool]) -> Iterator[None]:
    """Libraries compute step by step, and the same for every batch, while the body is traced.

    ``transformers`` leaves an attention mask away when no token of the batch is padding. That
    decision reads the data; for tracers (``is_tracing``) it always builds the mask, which computes
    the same. Transformer modules of torch go by their fast path in evaluation, and look into a
    mask to find out whether it is causal; both is faster only. And no forward may seed torch's
    generator, which no stage would do again.

    Args:
        is_recording: whether a call would be seen; leaf modules may do as they like.
    """
    names = ("transformers.masking_utils", "transformers.modeling_utils")
    loaded: list[Any] = [sys.modules.get(name) for name in names]
    places = [
        (module, "is_tracing", lambda *args, **kwargs: True)
        for module in loaded
        if hasattr(module, "is_tracing")
    ]
    places += [
        (place, name, _refused(getattr(place, name), is_recording))
        for place in (torch, torch.random)
        for name in ("manual_seed", "seed", "set_rng_state")
    ]
    detected: Any = lambda mask, is_causal=None, size=None: is_causal is True  # noqa: E731
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with replaced([*places, (transformer, "_detect_is_causal_mask", detected)]):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


def _refused(original: Callable[..., Any], is_recording: Callable[[], bool]) -> Callable[..., Any]:
    def refused(*args: Any, **kwargs: Any) -> Any:
        if not is_recording():
            return original(*args, **kwargs)
        raise CaptureError(
            f"{user_location()} calls torch.{original.__name__} inside of forward, which would "
            f"change what other stages draw: {REMEDY}"
        )

    return refused
