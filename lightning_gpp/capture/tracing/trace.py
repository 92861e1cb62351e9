"""The intermediate form: a ``torch.fx.Graph`` with the user's modules as its targets.

Placeholders are the tensor arguments; ``call_module`` targets are qualified names; ``get_attr``
reads parameters and buffers by canonical name; every other constant (numbers, devices, tensors
that are neither parameter nor buffer) stands literally among the arguments. The output node
holds the flat leaves of what forward returned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_gpp.capture.errors import GuardError, user_location
from lightning_gpp.capture.tracing.keep_whole import HostDraws
from lightning_gpp.capture.values.host_weights import original
from lightning_gpp.capture.values.structure import Structure
from lightning_gpp.common.tensor_places import tensor_places
from lightning_gpp.common.torch_device import types_in_use


@dataclass(frozen=True, slots=True)
class Trace:
    """One forward in one mode.

    Attributes:
        graph: as the module describes.
        output: structure of what forward returns; its leaves are the output node's arguments.
        calls: every call of a module, but those inside of leaf modules, in order.
    """

    graph: fx.Graph
    output: Structure
    calls: tuple[Call, ...] = ()

    @property
    def outputs(self) -> tuple[Any, ...]:
        """A node or a constant per leaf of the output."""
        leaves: tuple[Any, ...] = tuple(self.graph.output_node().args[0])  # type: ignore[arg-type]
        return leaves


@dataclass
class Names:
    """Canonical (first) names of the modules, parameters and buffers of a module."""

    modules: dict[int, str] = field(default_factory=dict)
    tensors: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module) -> Names:
        """The names, by the id of what they name."""
        names = cls({id(item): name for name, item in module.named_modules()})
        for place in tensor_places(module):
            names.tensors.setdefault(id(place.tensor), place.name)
        return names

    def of_tensor(self, tensor: Tensor) -> str | None:
        """The name of a parameter or buffer, or of what it is a copy of; None for others."""
        return self.tensors.get(id(original(tensor)))

    def canonical(self, module: nn.Module) -> dict[str, str]:
        """Every name of a parameter or buffer of ``module`` -> its canonical name."""
        places = tensor_places(module, remove_duplicate=False)
        return {place.name: self.tensors[id(place.tensor)] for place in places}


@dataclass
class Recorder:
    """Creates nodes that know where they come from.

    Every node's ``meta`` gets ``scope`` (the module whose forward made the call), ``location``
    (the user's line), ``calls`` (the calls of modules that were running, outermost first) and
    ``switches`` (the context managers under which the forward makes the call, with arguments).
    """

    autocast: tuple[DeviceAutocast, ...] = field(default_factory=lambda: autocast_state())
    attention: tuple[SDPBackend, ...] = field(default_factory=lambda: attention_kernels())
    draws: HostDraws = field(default_factory=HostDraws)
    calls: list[Call] = field(default_factory=lambda: [Call("", 0)])
    counts: Counter[str] = field(default_factory=Counter)
    entered: list[Call] = field(default_factory=lambda: [Call("", 0)])

    @property
    def scope(self) -> str:
        """Qualified name of the module whose forward is running."""
        return self.calls[-1].name

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Nodes made meanwhile belong to the module ``name``.

        Raises:
            KeepWholeError: a module drew random numbers outside of torch.
        """
        self.draws.check(self.scope)
        self.calls.append(self.enter(name))
        try:
            with self.draws.checked(name):
                yield
        finally:
            self.calls.pop()

    def enter(self, name: str) -> Call:
        """Notes a call of the module ``name``."""
        self.entered.append(Call(name, self.counts[name]))
        self.counts[name] += 1
        return self.entered[-1]

    def mark(self, node: fx.Node) -> fx.Node:
        """Fills in the node's ``meta``."""
        is_module = node.op == "call_module"
        node.meta["scope"] = str(node.target) if is_module else self.scope
        is_own_call = is_module and self.scope == node.target
        node.meta["calls"] = tuple(self.calls[:-1] if is_own_call else self.calls)
        node.meta["location"] = user_location()
        states = [state for state in autocast_state() if state not in self.autocast]
        switches: list[Switch] = [] if torch.is_grad_enabled() else [(torch.no_grad, ())]
        switches += [(torch.autocast, tuple(state)) for state in states]
        kernels = attention_kernels()
        if kernels != self.attention and _may_attend(node):
            switches.append((sdpa_kernel, (list(kernels),)))
        node.meta["switches"] = switches
        return node


Switch = tuple[Callable[..., Any], tuple[Any, ...]]
"""A context manager and its arguments."""


def _may_attend(node: fx.Node) -> bool:
    return node.op == "call_module" or "attention" in getattr(node.target, "__name__", "")


_ATTENTION: dict[SDPBackend, Callable[[], bool]] = {
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
}


def attention_kernels() -> tuple[SDPBackend, ...]:
    """The kernels that ``scaled_dot_product_attention`` may choose of now."""
    return tuple(kernel for kernel, is_enabled in _ATTENTION.items() if is_enabled())


class Call(NamedTuple):
    """One call of a module: its qualified name, and how often it was called before."""

    name: str
    number: int


class DeviceAutocast(NamedTuple):
    """The state of autocast on one type of device."""

    device_type: str
    dtype: torch.dtype
    enabled: bool


def autocast_state() -> tuple[DeviceAutocast, ...]:
    """The state of autocast now."""
    return tuple(
        DeviceAutocast(name, torch.get_autocast_dtype(name), torch.is_autocast_enabled(name))
        for name in types_in_use()
    )


@contextmanager
def context_of(node: fx.Node) -> Iterator[None]:
    """The gradient mode and other switches under which the user's code makes the call."""
    with ExitStack() as stack:
        for manager, args in node.meta["switches"]:
            stack.enter_context(manager(*args))
        yield


def guard(observed: Any, expected: Any, on_data: bool, location: str) -> None:
    """Node function: checks at run time a decision that the trace followed.

    Raises:
        GuardError: the decision comes out differently.
    """
    if isinstance(observed, Tensor):
        observed = observed.item()
    if observed != expected:
        what = "the data" if on_data else "the size of an input"
        raise GuardError(
            f"{location} depends on {what}: it saw {expected!r} when the model was captured and "
            f"sees {observed!r} now, so the captured graph does not fit. Keep the module with this "
            "control flow whole: name its type or path in leaf_modules=[...], or give blocks=...",
            on_data=on_data,
            location=location,
        )


def assign_buffer(module: nn.Module, name: str, value: Tensor) -> None:
    """Node function: what ``self.name = value`` does to a buffer."""
    setattr(module, name, value)


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Node function: applies a custom autograd function."""
    return function.apply(*args)  # type: ignore[no-untyped-call]


def identity(value: Any) -> Any:
    """Node function: gives a value a name of its own (a parameter that forward returns)."""
    return value


def rebuild(structure: Structure, *leaves: Any) -> Any:
    """Node function: puts a container together."""
    return structure.unflatten(leaves)
