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

from lightning_gpp.common.num_changes import num_changes


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
    kept = []
    for name in names:
        owner, key = owner_of(module, name), name.rpartition(".")[2]
        tensor = owner._buffers[key]
        assert tensor is not None, f"the buffer {name} was there at capture"
        kept.append((owner, key, tensor, tensor.detach().clone(), num_changes(tensor)))

    def put_back() -> None:
        with torch.no_grad():
            for owner, key, tensor, content, before in kept:
                # Comparing waits for a GPU: only what ``.data`` may have changed is compared.
                now = num_changes(tensor)
                is_written = now is not None and now != before
                may_be = now is None or owner.training
                if is_written or (may_be and not torch.equal(tensor, content)):
                    tensor.copy_(content)
                owner._buffers[key] = tensor

    return put_back
