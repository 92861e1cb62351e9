"""All-reduces gradients over replicas while the backward still runs.

Parameters of a stage are put into buckets of a few megabytes, from the last operators to the first,
as their gradients come. In the last backward of the stage for a mini-batch, a bucket whose
gradients are all there starts to be summed in the background (the idea of PyTorch DDP, VLDB 2020,
section 3.2.3). The REDUCE action at the end waits for the sums. Buckets start in an order that is
fixed beforehand and the same on all that sum, whatever comes first.

Contract of :class:`Sums` (``tests/distributed/sums_contract.py``): :meth:`Sums.start` returns at
once and the tensor is summed in place while its rank goes on; all ranks of a group begin its sums
in the same order; the result has the same bits on all of them; waiting gives up after ``timeout_s``
with a :class:`~lightning_gpp.runtime.waits.TransportError`; the error that ends all waits of a rank
(:class:`~lightning_gpp.runtime.waits.Waits`) ends these, too.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_gpp.cluster import BUCKET_BYTES
from lightning_gpp.common.host_copies import to_host
from lightning_gpp.runtime.payload import Payload, pack, unpack
from lightning_gpp.runtime.processes.groups import DeviceGroup, all_reduce, pipelines_of
from lightning_gpp.runtime.transport.transport import Tag, Transport
from lightning_gpp.runtime.waits import Waits
from lightning_gpp.schedule import Action, Program

Ranks = tuple[int, ...]


PendingSum = Callable[[float, str], object]
"""Waits until a tensor holds the sum that has begun: gets the seconds after which to give up, and
what for, for the error text (``"stage 2, replica 0 of 2, action 2R0"``)."""


class Sums(Protocol):
    """Starts all-reduces on one rank."""

    def start(self, tensor: Tensor, ranks: Ranks) -> PendingSum:
        """Begins to sum a contiguous tensor in place over ranks, this one among them."""


CPU = torch.device("cpu")


class ProcessSums:
    """The :class:`~lightning_gpp.runtime.sums.Sums` of one process.

    Args:
        groups: sets of ranks of a pipeline that will sum; all ranks of the world make the same
            ones together.
        timeout_s: limit that ``torch.distributed`` itself keeps.
        device: where this rank's tensors are.
        waits: of this rank.
        num_pipelines: that are side by side, each with sums of its own.
    """

    def __init__(
        self,
        groups: Iterable[Ranks],
        timeout_s: float,
        device: torch.device = CPU,
        waits: Waits | None = None,
        num_pipelines: int = 1,
    ) -> None:
        self.waits = waits or Waits()
        self._groups: dict[Ranks, DeviceGroup] = {}
        for ranks in sorted(set(groups)):
            sets = [[own[rank] for rank in ranks] for own in pipelines_of(num_pipelines)]
            group = DeviceGroup.new(sets, device, timeout_s, self.waits)
            if group is not None:
                self._groups[ranks] = group

    def start(self, tensor: Tensor, ranks: Ranks) -> PendingSum:
        """Begins an all-reduce."""
        if tensor.is_meta:
            tensor = torch.zeros(1)  # ranks meet, there is nothing to add up
        missing = f"the gradients of ranks {', '.join(map(str, ranks))} were not summed"
        return self._groups[ranks].begin(tensor, all_reduce, missing, in_place=True)

    def close(self) -> None:
        """Gives the groups back; all ranks call it."""
        for group in self._groups.values():
            group.destroy()
        self._groups = {}


SHARED_GRADIENTS = -2
"""First number of the tags of messages with gradients."""


def sum_shared(
    parameters: Sequence[Parameter],
    ranks: Sequence[int],
    number: int,
    transport: Transport,
    receive: Callable[[int, Tag], Payload],
) -> None:
    """Sums gradients by messages: of what stages share, and sparse ones of replicas.

    The first of the ranks adds them up and answers with the sum. A message takes what there is:
    replicas do not know of each other which rows of a table they used.

    Args:
        parameters: the same on all of the ranks.
        ranks: those that hold it.
        number: of the sum, for the tags.
        transport: of this rank.
        receive: receives a message from a rank.
    """
    up: Tag = (SHARED_GRADIENTS, number, 0, 0)
    down: Tag = (SHARED_GRADIENTS, number, 1, 0)
    gradients: list[Tensor | None] = [parameter.grad for parameter in parameters]
    if transport.rank != ranks[0]:
        transport.send(pack(gradients), target=ranks[0], tag=up)
        gradients = unpack(receive(ranks[0], down))
    else:
        for rank in ranks[1:]:
            gradients = _added(gradients, unpack(receive(rank, up)))
        for rank in ranks[1:]:
            transport.send(pack(gradients), target=rank, tag=down)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _added(
    gradients: Sequence[Tensor | None], others: Sequence[Tensor | None]
) -> list[Tensor | None]:
    return [
        other if own is None else own if other is None else own + other
        for own, other in zip(gradients, others, strict=True)
    ]


@dataclass(slots=True)
class GradientBucket:
    """Parameters whose gradients are all-reduced together.

    Attributes:
        number: number of the REDUCE action that waits for it.
        ranks: ranks that take part.
        parameters: by name; all of one type.
        final_in: the last backward of their stage; None where there is none.
        missing: parameters whose gradient may still come.
        flat: the gradients one after the other, and for each whether it exists (1 or 0).
        had_gradient: for each parameter whether it had a gradient here (1 or 0).
        pending: the sum, once it has begun.
    """

    number: int
    ranks: Ranks
    parameters: Mapping[str, Parameter]
    final_in: Action | None = None
    missing: set[str] = field(default_factory=set)
    flat: Tensor = field(default_factory=lambda: torch.empty(0))
    had_gradient: list[float] = field(default_factory=list)
    pending: PendingSum | None = None

    def start(self, sums: Sums) -> None:
        """Begins the sum. Where there is no gradient, zeros take part."""
        pieces = [_flat_gradient(name, p) for name, p in self.parameters.items()]
        self.had_gradient = [float(p.grad is not None) for p in self.parameters.values()]
        flags = (  # written where they are: a copy from the host would wait for it
            pieces[0].new_full((len(list(run)),), flag)
            for flag, run in itertools.groupby(self.had_gradient)
        )
        self.flat = torch.cat([*pieces, *flags])
        del pieces
        self.give(self.had_gradient)  # so that no gradient is held twice
        self.pending = sums.start(self.flat, self.ranks)

    def wait(self, timeout_s: float, purpose: str) -> None:
        """Waits for the sum; parameters that had a gradient have its sum."""
        assert self.pending is not None
        self.pending(timeout_s, purpose)
        self.give(self.had_gradient)

    def give(self, has_gradient: Sequence[float]) -> None:
        """Gradients are pieces of the flat tensor, where there are any."""
        sizes = [parameter.numel() for parameter in self.parameters.values()]
        pieces = torch.split(self.flat, [*sizes, len(sizes)])
        for parameter, piece, flag in zip(
            self.parameters.values(), pieces, has_gradient, strict=False
        ):
            if flag:
                parameter.grad = piece.view_as(parameter)


def _flat_gradient(name: str, parameter: Parameter) -> Tensor:
    if parameter.grad is None:
        return parameter.detach().new_zeros(parameter.numel())
    if parameter.grad.layout is not torch.strided:
        raise RuntimeError(
            f"parameter {name!r} has a sparse gradient, which is summed over the replicas of its "
            "stage where a module says so (nn.Embedding(sparse=True)), not where a function does; "
            "use the module, or sparse=False, or give the stage one device"
        )
    return parameter.grad.detach().reshape(-1)


class GradientReduction:
    """The all-reduces of one mini-batch, for the stages of a device.

    Args:
        program: what runs.
        device: whose.
        rank_of_device: rank of every device.
        parameters: of this device, by canonical name; others are not summed here.
        sums: begins sums.
        minibatch: which of the program.
    """

    def __init__(
        self,
        program: Program,
        device: int,
        rank_of_device: Sequence[int],
        parameters: Mapping[str, Parameter],
        sums: Sums,
        minibatch: int = 0,
    ) -> None:
        self._sums = sums
        self._started = 0
        self._buckets: list[GradientBucket] = []
        for number, of, group in program.sums():
            if group.stage is None or device not in group.devices or of != minibatch:
                continue
            known = {name: parameters[name] for name in group.parameters if name in parameters}
            trained = {name: each for name, each in known.items() if each.requires_grad}
            ranks = tuple(sorted(rank_of_device[device] for device in group.devices))
            final_in = program.last_backward(device, group.stage, minibatch)
            self._buckets += [
                GradientBucket(number, ranks, part, final_in, set(part)) for part in _cut(trained)
            ]

    @contextlib.contextmanager
    def watching(self, action: Action) -> Iterator[None]:
        """The body is a backward: begins the sums of what is final in it as soon as it can."""
        buckets = [bucket for bucket in self._buckets if bucket.final_in == action]
        handles = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._hook(bucket, name)
            )
            for bucket in buckets
            for name, parameter in bucket.parameters.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for bucket in buckets:  # what has no gradient now gets none any more
            bucket.missing.clear()
        self._start()

    def finish(self, number: int, timeout_s: float, purpose: str) -> None:
        """Waits for sums; by now no backward of this device is left.

        Args:
            number: of those that are waited for.
            timeout_s: limit of every wait.
            purpose: what for, for errors.
        """
        for bucket in self._buckets:
            bucket.missing.clear()
        self._start()
        due = [bucket for bucket in self._buckets if bucket.number == number]
        for bucket in due:
            bucket.wait(timeout_s, purpose)
        # Parameters that have a gradient on some replica have it on all.
        lacking = [bucket for bucket in due if not all(bucket.had_gradient)]
        counts = to_host(bucket.flat[-len(bucket.parameters) :] for bucket in lacking)
        for bucket, found in zip(lacking, counts, strict=True):
            bucket.give(bucket.had_gradient if found.is_meta else found.tolist())

    def _hook(self, bucket: GradientBucket, name: str) -> Callable[[Tensor], None]:
        def came(_: Tensor) -> None:
            bucket.missing.discard(name)
            self._start()

        return came

    def _start(self) -> None:
        """Begins the sums whose turn it is."""
        while self._started < len(self._buckets) and not self._buckets[self._started].missing:
            self._buckets[self._started].start(self._sums)
            self._started += 1


def _cut(parameters: Mapping[str, Parameter]) -> Iterable[dict[str, Parameter]]:
    """Buckets from the last parameter to the first, each of one type and device.

    >>> import torch
    >>> big = torch.nn.Parameter(torch.zeros(BUCKET_BYTES // 4))
    >>> small = torch.nn.Parameter(torch.zeros(1))
    >>> [list(bucket) for bucket in _cut({"a": small, "b": small, "c": big, "d": small})]
    [['d', 'c'], ['b', 'a']]
    >>> half = torch.nn.Parameter(torch.zeros(1).half())
    >>> [list(bucket) for bucket in _cut({"a": small, "b": half, "c": small, "d": half})]
    [['d', 'b'], ['c', 'a']]
    """
    buckets: dict[torch.dtype, dict[str, Parameter]] = {}
    num_bytes = Counter[torch.dtype]()
    for name, parameter in reversed(list(parameters.items())):
        dtype = parameter.dtype
        buckets.setdefault(dtype, {})[name] = parameter
        num_bytes[dtype] += parameter.nbytes
        if num_bytes[dtype] >= BUCKET_BYTES:
            yield buckets.pop(dtype)
            del num_bytes[dtype]
    yield from buckets.values()
