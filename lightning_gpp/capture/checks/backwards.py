"""Finds backwards that may look at gradients of other samples.

Where a batch is cut, a hook is called for every micro-batch, with a part of the gradient; so is the
backward of an autograd function. What a hook does (clip, normalize, draw) nobody can know; of a
function it is tried whether gradients of both halves of the samples add up to those of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpp.capture.errors import user_location
from lightning_gpp.capture.tracing.keep_whole import is_of_library
from lightning_gpp.capture.tracing.sizes import stored_applies
from lightning_gpp.capture.values.placed import HostWeights
from lightning_gpp.capture.values.structure import tensors_of
from lightning_gpp.common.instance_attribute import replaced
from lightning_gpp.common.mapped_tensor import is_mapped

_NUM_SUMS = 4096
_LIBRARIES = ("torch.", "torch_geometric.", "transformers.")

_UNEQUAL, _NOISE = 0.05, 1e-4
"""Of a parameter's gradient, and of all gradients: what differs more is no rounding."""


@dataclass(slots=True)
class Backwards:
    """Hooks and autograd functions that a forward's backward goes through.

    Attributes:
        hook: source line that registers a hook on a gradient; None if there is none.
        function: name of an autograd function of the user; None if there is none.
    """

    hook: str | None = None
    function: str | None = None

    def described(self, module: nn.Module) -> str | None:
        """Names the hook or function, or a hook of the module itself; None if there is none."""
        function = self.function and f"forward has a backward of its own ({self.function})"
        return self.hook or hooked(module) or function


@contextmanager
def watched_backwards(module: nn.Module) -> Iterator[Backwards]:
    """Looks out for them while the body runs the module's forward."""
    found = Backwards()
    hook, apply = vars(Tensor)["register_hook"], vars(torch.autograd.Function)["apply"].__func__

    def register_hook(self: Tensor, *args: Any) -> Any:
        if not is_of_library(location := user_location()):
            found.hook = found.hook or f"{location} puts a hook on a gradient"
        return hook(self, *args)

    def applied(kind: Any, *args: Any, **kwargs: Any) -> Any:
        if not f"{kind.__module__}.".startswith(_LIBRARIES):
            found.function = found.function or kind.__name__
        return apply(kind, *args, **kwargs)

    places = (
        *stored_applies(module),
        (Tensor, "register_hook", register_hook),
        (torch.autograd.Function, "apply", classmethod(applied)),
    )
    with replaced(places):
        yield found


def hooked(module: nn.Module) -> str | None:
    """A part of a module, or a parameter of it, that has a hook on its gradient; None for none."""
    for name, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            return f"a hook looks at gradients of {name or type(module).__name__}"
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return f"a hook looks at the gradient of {name}"
    return None


def weighted_sum(output: Any, rows: Tensor | None = None, num: int = 0) -> Tensor | None:
    """A number that depends on every entry of an output in a different way; None without gradients.

    Args:
        output: of a forward.
        rows: the samples that it is of, if only entries of samples count.
        num: of all samples.
    """
    generator = torch.Generator().manual_seed(0)
    loss = None
    for leaf in tensors_of(output):
        is_meant = rows is None or (leaf.dim() and len(leaf) == len(rows))
        if not (leaf.requires_grad and is_meant):
            continue
        weights = torch.empty_like(leaf)
        if not leaf.is_meta:
            shape = leaf.shape if rows is None else (num, *leaf.shape[1:])
            weights = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5
        term = (leaf * (weights if rows is None else weights[rows]).to(leaf)).sum()
        term = term.real if term.is_complex() else term
        loss = term if loss is None else loss + term.to(loss)
    return loss


def gradients_of(
    loss: Tensor | None, module: nn.Module, inputs: Mapping[str, Tensor], weights: HostWeights
) -> dict[str, Tensor | None]:
    """Gradients of a module's parameters and inputs by name, after which they are cleared.

    Of those of parameters in files sums are given: memory and disk have no room for them all.
    """
    sums: dict[Tensor, Tensor] = {}

    def condense(parameter: Tensor) -> None:
        if parameter.grad is not None and parameter.grad.layout is torch.strided:
            found = _weighted_sums(parameter.grad)  # once per use where weights visit a device
            sums[parameter] = sums[parameter] + found if parameter in sums else found
            parameter.grad = None

    handles = []
    for parameter in module.parameters():
        parameter.grad = None  # rollback puts it back
        if parameter.requires_grad and is_mapped(parameter):
            hook: Any = parameter.register_post_accumulate_grad_hook
            handles.append(hook(condense))
    try:
        if loss is not None and loss.requires_grad:
            with weights.visiting():
                loss.backward()  # type: ignore[no-untyped-call]
    finally:
        for handle in handles:
            handle.remove()
    sources = dict(module.named_parameters()) | dict(inputs)
    return {name: sums.get(item, item.grad) for name, item in sources.items() if item.requires_grad}


def _weighted_sums(tensor: Tensor) -> Tensor:
    """Sums of pieces of a tensor, as large as its values, in which every element weighs its own."""
    pieces = torch.split(tensor.reshape(-1), -(-tensor.numel() // _NUM_SUMS))
    generator = torch.Generator().manual_seed(0)
    weights = (torch.rand(len(pieces[0]), generator=generator) + 0.5).to(tensor)
    weights /= len(weights) ** 0.5
    return torch.stack([piece @ weights[: len(piece)] for piece in pieces])


def add_up(num: int, gradients: Callable[[Tensor], Mapping[str, Tensor]]) -> bool:
    """Whether the gradients of all samples are those of both halves together.

    Args:
        num: of the samples.
        gradients: of a loss that sums over the samples of these numbers, by name of a parameter.
    """
    rows = torch.arange(num)
    whole, *halves = map(gradients, (rows, rows[: num // 2], rows[num // 2 :]))
    total = sum(float(each.norm()) for each in whole.values())
    for name, of_all in whole.items():
        apart = of_all - sum(half[name] for half in halves if name in half)
        sizes = (half[name].norm() for half in halves if name in half)
        most = max(map(float, (of_all.norm(), *sizes)))
        if not float(apart.norm()) <= _UNEQUAL * most + _NOISE * total:
            return False
    return True
