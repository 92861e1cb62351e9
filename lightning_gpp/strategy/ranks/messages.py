"""The messages by which rank 0 leads: followers follow calls, not steps.

A message is told together with :class:`News` (as :class:`Told`), so that what user code changed
before a call holds on all ranks when the call runs there. Several messages go out in every step, so
their classes have no slots: a frozen dataclass with slots is pickled by Python code, one without
in C.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_gpp.strategy.logging.logs import LogCall


@dataclass(frozen=True)
class News:
    """What changed on rank 0 since its last message.

    Attributes:
        changes: of learning rates, plain attributes and the like, by user code.
        dropped: calls of which no backward can come any more.
        gradients: of parameters that other ranks hold as well, where the user's own code added to
            them beside the pipelined forward; the whole gradient by name.
    """

    changes: Mapping[Any, Any] = field(default_factory=dict)
    dropped: Sequence[int] = ()
    gradients: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Told:
    """A message, one of the classes below, with the changes before it."""

    message: Any
    news: News


@dataclass(frozen=True)
class BatchRead:
    """Rank 0 has read a batch.

    Attributes:
        num_samples: samples in it, if rank 0 can tell.
        is_none: whether the loader returned None, for which Lightning makes no step.
    """

    num_samples: int | None
    is_none: bool = False


@dataclass(frozen=True)
class DataEnd:
    """The data loader is exhausted."""


@dataclass(frozen=True)
class Autocast:
    """The autocast around a call of the pipelined forward.

    Attributes:
        is_on: whether there is one.
        dtype: type of its computations.
        keeps_casts: whether a weight is cast once for all that use it.
    """

    is_on: bool
    dtype: torch.dtype
    keeps_casts: bool

    @classmethod
    def current(cls, device: torch.device) -> Autocast:
        """The one that the caller is in."""
        kind = device.type
        return cls(
            torch.is_autocast_enabled(kind),
            torch.get_autocast_dtype(kind),
            torch.is_autocast_cache_enabled(),
        )

    @property
    def dtype_in_use(self) -> torch.dtype | None:
        """Type of its computations; None if autocast is off."""
        return self.dtype if self.is_on else None

    def on(self, device: torch.device) -> torch.autocast:
        """The same on this rank's device."""
        kind = device.type
        dtype = self.dtype if self.is_on else torch.get_autocast_dtype(kind)
        return torch.autocast(kind, dtype=dtype, enabled=self.is_on, cache_enabled=self.keeps_casts)

    @contextmanager
    def while_building(self, device: torch.device) -> Iterator[None]:
        """The same on this rank's device and on the CPU, where models are captured."""
        with self.on(_CPU), self.on(device):
            yield


_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Build:
    """Build the pipeline of a new form of call."""

    autocast: Autocast


@dataclass(frozen=True)
class UseForm:
    """Use the pipeline of another form of call.

    Attributes:
        number: of its pipeline.
    """

    number: int


@dataclass(frozen=True)
class Trial:
    """Run the forward on a few samples, to see whether cutting changes its outputs.

    Attributes:
        passes: samples of each of the smallest micro-batches of each pass.
        is_trained: whether passes are cut as a mini-batch that trains.
        training: mode of the modules, of one trial each.
        autocast: the user's.
    """

    passes: list[list[int]]
    is_trained: bool
    training: bool
    autocast: Autocast


@dataclass(frozen=True)
class SentAhead:
    """Inputs that rank 0 has sent during the step before.

    Attributes:
        number: under which they were sent.
        form: number of the pipeline that they were sent for.
        units: samples of each of the smallest micro-batches.
        is_right: whether they are those of the call.
    """

    number: int
    form: int
    units: list[int]
    is_right: bool


@dataclass(frozen=True)
class Forward:
    """Run a call of the pipelined forward.

    Attributes:
        call: its number; None if no backward can follow.
        units: samples of each of the smallest micro-batches.
        training: whether modules are in training mode.
        needs: arguments that need a gradient.
        autocast: the user's.
        chunks: which part of one graph every micro-batch is, where they are that.
        fills: whether the histories of one graph are filled by an exact pass.
        ahead: inputs that were sent before it, for this call as rank 0 guessed.
    """

    call: int | None
    units: list[int]
    training: bool
    needs: frozenset[str]
    autocast: Autocast
    chunks: tuple[int, ...] = ()
    fills: bool = False
    ahead: SentAhead | None = None


@dataclass(frozen=True)
class Backward:
    """Run the backward of a call.

    Attributes:
        call: its number.
        retain: whether it can be run again.
        hands_out: whether parameters get their gradients.
    """

    call: int
    retain: bool
    hands_out: bool


@dataclass(frozen=True)
class BackwardEnd:
    """The backward of the loss has ended."""


@dataclass(frozen=True)
class StepEnd:
    """The user's step has returned.

    Attributes:
        logs: calls of ``self.log``.
        loss: of a training step.
        terminated: rank that was asked to end (SIGTERM), which all do after this step.
    """

    logs: list[LogCall]
    loss: Tensor | None
    terminated: int | None


@dataclass(frozen=True)
class HookEnd:
    """A hook of the user has returned.

    Attributes:
        answer: what it returned.
        logs: calls of ``self.log``.
    """

    answer: Any
    logs: list[LogCall]


@dataclass(frozen=True)
class AsideEnd:
    """The code outside of a step has ended.

    Attributes:
        value: its result.
    """

    value: Any


@dataclass(frozen=True)
class ReadAll:
    """Gather all weights: somebody reads them.

    Attributes:
        is_everywhere: whether on all ranks.
    """

    is_everywhere: bool


@dataclass(frozen=True)
class ReadEnd:
    """Nobody reads all weights any more: every rank keeps its own again."""


@dataclass(frozen=True)
class ManualBackward:
    """The user called ``self.manual_backward``."""

    loss: Tensor


@dataclass(frozen=True)
class RelayedCall:
    """Manual optimization: call a method that changes parameters on all ranks.

    Attributes:
        owner: qualified name of a module, or the index of an optimizer.
        method: its name.
        args: arguments, with :class:`OptimizerRef` in place of optimizers.
        kwargs: likewise.
    """

    owner: str | int
    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class OptimizerRef:
    """Stands for an optimizer, by its index."""

    index: int


@dataclass(frozen=True)
class Minibatch:
    """Run a mini-batch whose step runs once per micro-batch.

    Attributes:
        units: samples of each of the smallest micro-batches.
        needs: arguments of the forward that need a gradient.
        loss_scale: what losses are multiplied by before they go backward; gradients are divided by
            it when they are handed out.
    """

    units: list[int]
    needs: frozenset[str]
    loss_scale: float = 1.0


@dataclass(frozen=True)
class AsyncMinibatch:
    """Run one window of a pipeline that does not drain.

    Attributes:
        since: mini-batches of the epoch that went backward; before it the pipeline is empty.
        remaining: mini-batches that will follow, as far as they are read ahead.
    """

    since: int
    remaining: int
