"""Buffers that a forward changes alike whatever its arguments are, and how they are put back.

A counter of calls, or the vectors of a spectral norm's power iteration, change once per call. Of a
mini-batch that is cut, every micro-batch is a call: put back before each of them but the first,
such buffers end up as after one call with the whole mini-batch, and every micro-batch sees what
that call would see. Buffers that depend on the samples (statistics) cannot be had like this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_gpp.capture.values.samples import Sample


def other_content(sample: Sample) -> Sample:
    """Inputs that differ from the given ones in number and content.

    One more sample than there are; all are the first one. Numbers become smaller, which hardly any
    forward minds; of graphs there are twice as many.
    """
    if sample.graphs is not None:
        tensors, count = sample.graphs.twice_and_a_node(sample.tensors), 2 * sample.num_samples
    else:
        count = sample.num_samples + 1
        tensors = {name: _of_first(t, sample.num_samples) for name, t in sample.tensors.items()}
    scaled = {name: t.detach() * 0.75 if _is_real(t) else t for name, t in tensors.items()}
    flags = {name: tensor.requires_grad for name, tensor in sample.tensors.items()}
    return Sample({n: t.requires_grad_(flags[n]) for n, t in scaled.items()}, count)


def _of_first(tensor: Tensor, num_samples: int) -> Tensor:
    if not tensor.dim() or len(tensor) != num_samples:
        return tensor.detach()
    return tensor.detach()[[0] * (num_samples + 1)]


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def steady_names(
    module: nn.Module,
    changing: Iterable[str],
    after: Mapping[str, Tensor],
    after_other: Mapping[str, Tensor],
) -> frozenset[str]:
    """Which of the buffers that a forward changes are the same after it on other arguments.

    Not the count of a BatchNorm without momentum: it weighs the statistics, which are taken per
    micro-batch.

    Args:
        module: whose forward.
        changing: canonical names of the buffers that it changes.
        after: the buffers after a call, by name.
        after_other: after a call with other arguments.
    """
    return frozenset(
        name
        for name in changing
        if not after[name].is_meta
        and torch.equal(after[name], after_other[name])
        and getattr(owner_of(module, name), "momentum", 0) is not None
    )


def unsteady_names(module: nn.Module, changing: Iterable[str], steady: frozenset[str]) -> list[str]:
    """The other ones, without those of BatchNorm, whose statistics are known to be so."""
    return sorted(
        name
        for name in frozenset(changing) - steady
        if not isinstance(owner_of(module, name), _BatchNorm)
    )


def owner_of(module: nn.Module, name: str) -> nn.Module:
    """The sub-module that has a buffer."""
    return module.get_submodule(name.rpartition(".")[0])


def keep(module: nn.Module, names: Iterable[str]) -> Callable[[], None]:
    """What puts buffers back to what they are now.

    Unchanged ones are left alone, as autograd may have saved them.
    """
    kept = [_Kept(owner_of(module, name), name.rpartition(".")[2]) for name in names]

    def put_back() -> None:
        with torch.no_grad():
            for item in kept:
                item.put_back()

    return put_back


class _Kept:
    """A buffer of a module, and what it held."""

    def __init__(self, owner: nn.Module, key: str) -> None:
        tensor = owner._buffers[key]
        assert tensor is not None, f"the buffer {key} was there at capture"
        self._owner, self._key, self._tensor = owner, key, tensor
        self._content, self._version = tensor.detach().clone(), _version(tensor)

    def put_back(self) -> None:
        if self._is_changed():
            self._tensor.copy_(self._content)
        self._owner._buffers[self._key] = self._tensor

    def _is_changed(self) -> bool:
        """Comparing waits for a GPU: only what ``.data`` may have changed is compared."""
        version = _version(self._tensor)
        if version is not None and version != self._version:
            return True
        if version is not None and not self._owner.training:
            return False
        return not torch.equal(self._tensor, self._content)


def _version(tensor: Tensor) -> int | None:
    """Counts the changes that autograd knows of, if it knows the tensor."""
    return None if tensor.is_inference() else tensor._version
