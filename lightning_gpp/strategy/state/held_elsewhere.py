"""Lets the user's step ask for devices and shapes of parameters that other ranks hold.

A step may ask a parameter for its device or make zeros like it (``next(self.parameters())
.new_zeros(...)``). On rank 0 the parameters of other stages are on the ``meta`` device, and what
is made from them so would have no values. Only what needs no values of the parameter is answered.

torch raises where a value is missing, but for some functions that change a tensor in place
(``teacher.add_(self.layer.weight)``), which then do nothing; here they raise.

User code that changes weights through ``.data`` is not seen by autograd, which counts the versions
of tensors; here it is, so that such a change is an error and not lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from lightning_gpp.strategy.lightning_private import innermost_function_mode

_DEVICE = Tensor.device.__get__
_GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]

ONLY_SOME = (
    "backward(inputs=...) for parameters of the pipelined module does not work with the graphpipe "
    "strategy: its stages are on several ranks. Freeze the others (requires_grad_(False), "
    "toggle_optimizer)."
)


_LACKS_VALUES = ("meta tensor", "device meta", "'meta' backend")
"""What torch says of it."""

LACKS_VALUES = (
    "this code needs values of parameters or buffers that another rank holds. Call the whole "
    "pipelined module instead of a part of it. If the step needs a weight, such as a temperature "
    "to log, return it from forward. Read weights in hooks around epochs, where "
    "parameters() and state_dict() gather them. For averages use WeightAveraging "
    "(EMAWeightAveraging), for penalties weight_decay. BYOL and MoCo train on one device."
)


class HeldElsewhere(TorchFunctionMode):
    """While active, tensors on the ``meta`` device answer as if they were on ``device``.

    Changes of parameters and of such tensors through ``.data`` count as changes. Where a value is
    wanted, the body ends with an error that says who has it.

    Args:
        device: of this rank; None for code of every rank, which may look for what is on ``meta``.
        of_stages: the ``id`` of every parameter that this rank's stages hold.
    """

    def __init__(
        self, device: torch.device | None, of_stages: frozenset[int] = frozenset()
    ) -> None:
        super().__init__()
        self.device = device
        self._of_stages = of_stages

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device, name = self.device, getattr(func, "__name__", "")
        if device is not None and args and isinstance(args[0], Tensor) and args[0].is_meta:
            if func == _DEVICE:
                return device
            is_factory = name.startswith("new_") or name.endswith("_like")
            if is_factory and kwargs.get("device") is None:
                kwargs = {**kwargs, "device": device}
        if func in (_GET_DATA, _SET_DATA) and (args[0].is_meta or isinstance(args[0], Parameter)):
            alias: Tensor = args[0].detach()  # has its version in common with the original
            if func == _GET_DATA:
                return alias
            func(*args)
            alias.add_(0)
            return None
        is_in_place = name.startswith("__i") if name.endswith("__") else name.endswith("_")
        if is_in_place and _has_meta(args[1:]) and not _has_meta(args[:1]):
            raise NotImplementedError(LACKS_VALUES)
        if func is Tensor.backward and kwargs.get("inputs") is not None:
            self._check_inputs(kwargs["inputs"])
        return func(*args, **kwargs)

    def __exit__(self, kind: Any, error: BaseException | None, place: Any) -> None:
        super().__exit__(kind, error, place)  # type: ignore[no-untyped-call]
        if isinstance(error, RuntimeError) and any(t in str(error).lower() for t in _LACKS_VALUES):
            raise RuntimeError(LACKS_VALUES) from error

    def _check_inputs(self, inputs: Tensor | Iterable[Any]) -> None:
        """Stages give their parameters gradients by themselves: autograd sees no way to them."""
        for tensor in [inputs] if isinstance(inputs, Tensor) else inputs:
            if isinstance(tensor, Tensor) and (tensor.is_meta or id(tensor) in self._of_stages):
                raise NotImplementedError(ONLY_SOME)


def _has_meta(values: Iterable[Any]) -> bool:
    """Whether there is a tensor without values among these, or in lists of them."""
    return any(
        value.is_meta
        if isinstance(value, Tensor)
        else isinstance(value, (list, tuple)) and _has_meta(value)
        for value in values
    )


@contextmanager
def lifted() -> Iterator[None]:
    """Stages run in this, and models are captured in it.

    They hold what they read, every call through a mode takes time, and modules of torch look for
    modes: an encoder takes another path where there is one.
    """
    mode = innermost_function_mode()
    if not isinstance(mode, HeldElsewhere):
        yield
        return
    mode.__exit__(None, None, None)
    try:
        yield
    finally:
        mode.__enter__()  # type: ignore[no-untyped-call]
