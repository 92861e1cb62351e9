"""What a forward calls, as far as it tells how samples meet in it.

Functions of torch that Python calls are recorded, those inside of modules that stay whole too. Of
tensors only shapes are kept, and numbers by which they are known again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.rnn import pad_packed_sequence
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_gpp.capture.errors import is_foreign, user_location
from lightning_gpp.capture.values.structure import leaves_of, tensors_of

_LIBRARIES = ("torch_geometric", "transformers")
"""What they decide by the data (whether a mask masks anything, how many graphs there are) does not
change what becomes of a sample."""
_PASS_ON = (
    *("torch/_tensor.py", "torch/functional.py", "torch/overrides.py", "torch/_jit_internal.py"),
    "torch/nn/functional.py",
)
"""Files of torch whose functions are called by the user's name for them."""
_FAST_PATHS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


@dataclass(frozen=True, slots=True)
class Seen:
    """A tensor.

    Attributes:
        number: its own.
        memory: number of its storage; its own, negative, where it has none.
        shape: of the tensor.
    """

    number: int
    memory: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TapedCall:
    """A call of a function of torch that takes or returns tensors.

    Attributes:
        name: of the function, the method or the attribute.
        location: ``file:line`` of the user.
        operands: the tensors that it takes.
        results: those that it returns, or changes without returning them.
        numbers: its other arguments that are whole numbers.
        has_mask: whether an operand beside the first is one of booleans.
        num_bounds: operands, the last, between which it takes a slice.
        by_library: whether code of a library calls it for purposes of its own.
    """

    name: str
    location: str
    operands: tuple[Seen, ...]
    results: tuple[Seen, ...]
    numbers: tuple[int, ...]
    has_mask: bool
    num_bounds: int
    by_library: bool


class Tape(TorchFunctionMode):
    """Records the calls of a forward.

    Attributes:
        calls: so far.
        inputs: of the forward.
        outputs: leaves of what the forward returned; None where it is no tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[TapedCall] = []
        self.inputs: tuple[Seen, ...] = ()
        self.outputs: tuple[Seen | None, ...] = ()
        self._numbers = WeakTensorKeyDictionary()
        self._memories: dict[StorageWeakRef, int] = {}  # kept, so that none is taken for another
        self._num_tensors = 0

    def record(self, forward: Callable[[dict[str, Tensor]], Any], inputs: dict[str, Tensor]) -> Any:
        """What the forward returns."""
        self.inputs = self._seen(inputs.values())
        with self:
            output = forward(inputs)
        leaves = leaves_of(output)
        self.outputs = tuple(self._seen_one(t) if isinstance(t, Tensor) else None for t in leaves)
        self._numbers, self._memories = WeakTensorKeyDictionary(), {}
        return output

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if torch._C._functorch.peek_interpreter_stack() is None:  # vmap has shapes of its own
            self._note(func, result, args, kwargs)
        return result

    def _note(
        self, func: Callable[..., Any], result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        leaves = leaves_of((args, kwargs))
        bounds = [part for leaf in leaves if isinstance(leaf, slice) for part in _parts(leaf)]
        operands = [leaf for leaf in (*leaves, *bounds) if isinstance(leaf, Tensor)]
        name = getattr(func, "__name__", str(func))
        if not operands and name != "randperm":
            return
        if name in ("__get__", "__set__"):
            name = func.__self__.__name__  # type: ignore[attr-defined]
        is_by_library = _is_by_library()
        if name == "_pad_packed_sequence" and _pads_to_longest():
            name, is_by_library = "pad_packed_sequence", False
        results = tensors_of(result)
        if name == "__setitem__":
            results.append(operands[0])
        self.calls.append(
            TapedCall(
                name,
                user_location(),
                self._seen(operands),
                self._seen(results),
                tuple(leaf for leaf in leaves if type(leaf) is int),
                any(operand.dtype is torch.bool for operand in operands[1:]),
                sum(isinstance(part, Tensor) for part in bounds),
                is_by_library,
            )
        )

    def _seen(self, tensors: Iterable[Tensor]) -> tuple[Seen, ...]:
        return tuple(map(self._seen_one, tensors))

    def _seen_one(self, tensor: Tensor) -> Seen:
        with torch._C.DisableTorchFunction():
            number = self._numbers.get(tensor)  # type: ignore[no-untyped-call]
            if number is None:
                number = self._numbers[tensor] = self._num_tensors
                self._num_tensors += 1
            memory = -1 - number
            if tensor.layout is torch.strided and not tensor.is_nested:
                storage = StorageWeakRef(  # type: ignore[no-untyped-call]
                    tensor.untyped_storage()
                )
                memory = self._memories.setdefault(storage, len(self._memories))
            return Seen(number, memory, tuple(tensor.shape) if not tensor.is_nested else ())


def can_be_taped(module: nn.Module, flags: Mapping[str, bool]) -> bool:
    """Whether a module computes on a tape what it computes without.

    Encoders of torch take another way in evaluation where nothing watches, not even autograd.

    Args:
        module: in question.
        flags: training flags of its sub-modules.
    """
    watched = torch.is_grad_enabled()
    return not any(
        isinstance(part, _FAST_PATHS)
        and not flags[name]
        and not (watched and any(item.requires_grad for item in part.parameters()))
        for name, part in module.named_modules()
    )


def _is_by_library() -> bool:
    """Whether the innermost line that calls torch is one of a library, or inside of torch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name != __file__ and not name.endswith(_PASS_ON):
            return is_foreign(name) or any(f"/{package}/" in name for package in _LIBRARIES)
        frame = frame.f_back
    return False


def _pads_to_longest() -> bool:
    """Whether ``pad_packed_sequence``, which is calling torch, was given no length to pad to."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not pad_packed_sequence.__code__:
        frame = frame.f_back
    return frame is None or frame.f_locals["total_length"] is None


def _parts(item: slice) -> tuple[Any, ...]:
    return item.start, item.stop, item.step
