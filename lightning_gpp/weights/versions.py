"""Keeps the weights of one stage as its policy requires."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils import _pytree as pytree

from lightning_gpp.common.tensor_places import memory_of
from lightning_gpp.weights.last_steps import LastSteps
from lightning_gpp.weights.policies import BackwardWeights, Place, Policy


class _VersionInUse:
    """The weights of a moment, for as long as a backward is to meet them.

    Attributes:
        values: a copy, once the parameters are others; until then they are it.
    """

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self._parameters = parameters
        self.values: dict[str, Tensor] = {}

    def met(self, name: str) -> Tensor:
        """One of them."""
        return self.values.get(name, self._parameters[name])

    def keep(self) -> None:
        """The parameters are about to change."""
        self.values = {name: own.detach().clone() for name, own in self._parameters.items()}


class StageWeights:
    """Provides the weights for every mini-batch of a stage.

    Args:
        policy: which weights to use.
        parameters: parameters of the stage, by name.
        last_steps: of the optimizers that update these parameters.
    """

    def __init__(
        self, policy: Policy, parameters: Mapping[str, Parameter], last_steps: Sequence[LastSteps]
    ) -> None:
        self._policy = policy
        self._parameters = parameters
        self._last_steps = last_steps
        self._newest: weakref.ref[_VersionInUse] | None = None
        self._before: _VersionInUse | None = None
        for watched in last_steps:
            watched.before_update.append(self._keep_newest)

    @contextlib.contextmanager
    def forward(self, place: Place) -> Iterator[Mapping[str, Tensor]]:
        """The forward of a mini-batch runs in this, which decides what its backward meets.

        Args:
            place: of the stage, for this mini-batch.

        Yields:
            The weights that it runs with, by name; their gradients go to the parameters.
        """
        policy = self._policy
        values = self._predicted(policy.forward(place))
        if policy.is_one_behind and not place.difference and self._before is not None:
            values = self._before.values
        weights = {name: routed(values[name], own) for name, own in self._parameters.items()}
        with self._saving(weights, place):
            yield weights

    def apart(self, values: Sequence[Any]) -> list[Any]:
        """What a stage hands on; copies of what lies in memory of its weights.

        The next update changes these, or the next prediction is written over them.
        """
        changing = [*self._parameters.values(), *self._kept()]
        own = set(map(memory_of, changing))

        def kept(leaf: Tensor) -> Tensor:
            return leaf.clone() if memory_of(leaf) in own else leaf

        return [pytree.tree_map_only(Tensor, kept, value) for value in values]

    def _saving(self, weights: Mapping[str, Tensor], place: Place) -> AbstractContextManager[None]:
        """What a forward with these weights runs in."""
        if self._policy.backward is BackwardWeights.OF_FORWARD:
            own = self._parameters
            if any(weight.data_ptr() != own[name].data_ptr() for name, weight in weights.items()):
                return contextlib.nullcontext()  # predicted: autograd keeps what it needs
            return meeting(weights, self._version_of_now().met, are_others=False)
        met_ahead = self._policy.backward_ahead(place)
        cache: dict[str, Tensor] = {}

        def met(name: str) -> Tensor:
            if not met_ahead:
                return self._parameters[name]
            if not cache:
                cache.update(self._predicted(met_ahead))
            return cache[name]

        return meeting(weights, met)

    def _version_of_now(self) -> _VersionInUse:
        """One for all forwards between two updates; whoever meets it keeps it alive."""
        version = None if self._newest is None else self._newest()
        if version is None:
            version = _VersionInUse(self._parameters)
            self._newest = weakref.ref(version)
        return version

    def forget(self) -> None:
        """Forgets older versions: the pipeline fills anew."""
        self._before = None

    def _keep_newest(self) -> None:
        """The parameters are about to change: keeps them for whoever will meet them."""
        version = None if self._newest is None else self._newest()
        if self._policy.is_one_behind:
            version = self._before = version or _VersionInUse(self._parameters)
        if version is not None:
            version.keep()
        self._newest = None

    def _predicted(self, ahead: int) -> dict[str, Tensor]:
        """The weights some updates ahead; the parameters' own memory where nothing is predicted.

        Where no backward keeps them, every prediction is written over the last one.
        """
        if not ahead:
            return {name: own.detach() for name, own in self._parameters.items()}
        found: dict[Tensor, Tensor] = {}
        anew = self._policy.backward is BackwardWeights.OF_FORWARD
        for watched in self._last_steps:
            found |= watched.predicted(self._parameters.values(), ahead, anew=anew)
        return {name: found.get(own, own.detach()) for name, own in self._parameters.items()}

    def _kept(self) -> Iterator[Tensor]:
        """What is held for predictions."""
        for watched in self._last_steps:
            yield from watched.copies(self._parameters.values())


# A backward that meets other weights than its forward ran with -----------------------------------
#
# PipeOptim's forwards run with predicted weights, and its backwards with those of the moment
# (section 3 of arXiv 2312.00839), so that no more than two versions are alive. Autograd would keep
# those of the forward. So what it saves of a weight is replaced by a note of which weight it was,
# and how it was looked at; when the backward asks for it, it gets the same part of the weight that
# is current then.


@dataclass(frozen=True, slots=True)
class _Noted:
    """A weight, or a view of one, that autograd would have kept."""

    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@contextlib.contextmanager
def meeting(
    weights: Mapping[str, Tensor], met: Callable[[str], Tensor], *, are_others: bool = True
) -> Iterator[None]:
    """Forwards in the body save which weights they used instead of the weights.

    Args:
        weights: that they run with, by name; of strided layout and memory of their own.
        met: gives the weight that a backward is to meet, asked when it runs.
        are_others: whether these are others than the forward runs with.

    Raises:
        NotImplementedError: the forward computes in half precision with weights of another type
            (autocast), so that the backward would meet casts of them.
    """
    # What autograd keeps of the hooks must not keep the weights.
    known = {memory_of(w): (name, w.dtype, int(w.storage_offset())) for name, w in weights.items()}
    dtypes = {weight.dtype for weight in weights.values()}
    strides = {name: weight.stride() for name, weight in weights.items()}

    def pack(tensor: Tensor) -> Any:
        if are_others and tensor.dtype in _HALF and tensor.dtype not in dtypes:
            raise NotImplementedError(_CASTS)
        found = known.get(memory_of(tensor))
        if found is None or tensor.dtype != found[1]:
            return tensor
        offset = int(tensor.storage_offset()) - found[2]
        return _Noted(found[0], tuple(tensor.shape), tuple(tensor.stride()), offset)

    def unpack(saved: Any) -> Tensor:
        if not isinstance(saved, _Noted):
            assert isinstance(saved, Tensor)
            return saved
        current = met(saved.name).detach()
        assert current.stride() == strides[saved.name], "a weight is laid out as its prediction is"
        offset = int(current.storage_offset()) + saved.offset
        return torch.as_strided(current, saved.size, saved.stride, offset)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


_CASTS = (
    "the forward computes in half precision with weights of another type (autocast), so its "
    "backward would meet casts of those weights: use weights='stash', or true half precision"
)

_HALF = (torch.float16, torch.bfloat16)


def routed(value: Tensor, parameter: Tensor) -> Tensor:
    """A tensor with these values whose gradient goes to a parameter.

    Shapes:
        - value: that of the parameter
    """
    routed_: Tensor = _Routed.apply(parameter, value)  # type: ignore[no-untyped-call]
    return routed_


class _Routed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
