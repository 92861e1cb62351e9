"""The intermediate form: a ``torch.fx.Graph`` with the user's modules as its targets.

Placeholders are the tensor arguments; ``call_module`` targets are qualified names; ``get_attr``
reads parameters and buffers by canonical name; every other constant (numbers, devices, tensors
that are neither parameter nor buffer) stands literally among the arguments. The output node
holds the flat leaves of what forward returned.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel

from lightning_gpp.capture.errors import REMEDY, GuardError, user_location
from lightning_gpp.capture.tracing.keep_whole import KeepWholeError, ModesDifferError, host_state
from lightning_gpp.capture.values.structure import Structure
from lightning_gpp.common.tensor_places import tensor_places
from lightning_gpp.common.torch_device import types_in_use

T = TypeVar("T")

SIZES = frozenset({"size", "shape", "numel", "nelement", "__len__"})
"""Calls that tell how large a tensor is."""
SELECTORS = frozenset({"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive"})
"""Calls that return as much as the data say."""


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

    def owned(self, module: nn.Module) -> dict[str, set[str]]:
        """Name of a part of ``module`` -> canonical names of parameters and buffers in it."""
        found: dict[str, set[str]] = {}
        for place in tensor_places(module, remove_duplicate=False):
            scope = place.name
            while scope:
                scope = scope.rpartition(".")[0]
                found.setdefault(scope, set()).add(self.tensors[id(place.tensor)])
        return found


@dataclass
class Recorder:
    """Creates nodes that know where they come from.

    Every node's ``meta`` gets ``scope`` (the module whose forward made the call), ``location``
    (the user's line), ``calls`` (the calls of modules that were running, outermost first),
    ``switches`` (the context managers under which the forward makes the call, with arguments), and
    what a value is: ``is_constant`` (no tensor of the user plays a part), ``selected`` (the data
    decide how large it is), ``of_sizes`` (it is a number of sizes only), ``draws`` (random numbers
    of torch). ``layer`` is the call of an opened layer around it, if there is one.
    """

    autocast: _Autocast = field(default_factory=lambda: autocast_state())
    attention: list[SDPBackend] = field(default_factory=_cur_sdpa_kernel_backends)
    host_state: Any = field(default_factory=host_state)
    calls: list[Call] = field(default_factory=lambda: [Call("", 0)])
    entered: list[Call] = field(default_factory=lambda: [Call("", 0)])
    counts: Counter[str] = field(default_factory=Counter)
    location: str = field(default_factory=user_location)
    opened: Collection[str] = ()

    @property
    def scope(self) -> str:
        """Qualified name of the module whose forward is running."""
        return self.calls[-1].name

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Nodes made meanwhile belong to the module ``name``, and so do errors (``scope``).

        Raises:
            KeepWholeError: a module drew random numbers outside of torch.
        """
        self.location = user_location()
        self.check_draws()
        self.calls.append(self.enter(name))
        try:
            yield
            self.check_draws()
        except KeepWholeError:
            raise
        except Exception as error:
            self.check_draws()  # which may be why
            vars(error).setdefault("scope", name)
            raise
        finally:
            self.calls.pop()
            self.location = user_location()

    def check_draws(self) -> None:
        """Checks that nothing was drawn outside of torch since the last check.

        Raises:
            KeepWholeError: something was, by the running module.
        """
        if host_state() != self.host_state:
            raise KeepWholeError(
                f"{self.location}, or a line near it, draws a random number outside of torch "
                "(random, numpy), which would be frozen into the graph: draw it with "
                f"torch.rand(...) and compute with the tensor, or {REMEDY}",
                self.scope,
            )

    def allow_draws(self) -> None:
        """What was drawn so far was drawn by a leaf module, which will draw anew."""
        self.host_state = host_state()

    def enter(self, name: str) -> Call:
        """Notes a call of the module ``name``."""
        self.entered.append(Call(name, self.counts[name]))
        self.counts[name] += 1
        return self.entered[-1]

    def mark(self, node: fx.Node) -> fx.Node:
        """Fills in the node's ``meta``."""
        self.location = user_location()
        is_module = node.op == "call_module"
        states = [state for state in autocast_state() if state not in self.autocast]
        switches: list[Switch] = [] if torch.is_grad_enabled() else [(torch.no_grad, ())]
        switches += [(torch.autocast, state) for state in states]
        kernels = _cur_sdpa_kernel_backends()
        may_attend = is_module or "attention" in getattr(node.target, "__name__", "")
        if kernels != self.attention and may_attend:
            switches.append((sdpa_kernel, (kernels,)))
        node.meta.update(
            scope=str(node.target) if is_module else self.scope,
            calls=tuple(self.calls),
            location=self.location,
            switches=switches,
            layer=next((call for call in self.calls if call.name in self.opened), None),
            # for all one knows
            **dict.fromkeys(("is_constant", "selected", "of_sizes", "draws"), False),
        )
        return node


Switch = tuple[Callable[..., Any], tuple[Any, ...]]
"""A context manager and its arguments."""


class Call(NamedTuple):
    """One call of a module: its qualified name, and how often it was called before."""

    name: str
    number: int


_Autocast = tuple[tuple[str, torch.dtype, bool], ...]


def autocast_state() -> _Autocast:
    """For every type of device, whether autocast is on and to which type."""
    return tuple(
        (name, torch.get_autocast_dtype(name), torch.is_autocast_enabled(name))
        for name in types_in_use()
    )


def run_call(op: str, target: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Calls a method by its name, or anything else."""
    if op == "call_method":
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs)


@contextmanager
def context_of(node: fx.Node) -> Iterator[None]:
    """The gradient mode and other switches under which the user's code makes the call."""
    with ExitStack() as stack:
        for manager, args in node.meta["switches"]:
            stack.enter_context(manager(*args))
        yield


def closure(start: Iterable[T], following: Callable[[T], Iterable[T]]) -> set[T]:
    """All nodes that can be reached from some nodes, themselves included."""
    found = set(start)
    stack = list(found)
    while stack:
        fresh = set(following(stack.pop())) - found
        found |= fresh
        stack += fresh
    return found


def guard(observed: Any, expected: Any, on_data: bool, location: str, scope: str) -> None:
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
            f"sees {observed!r} now, where forward would take another path: {REMEDY}",
            location,
            scope,
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


# Train and eval mode: two traces that must be one graph ------------------------------------------


def check_same_graph(train: Trace, evaluation: Trace) -> None:
    """Checks that two normalized traces differ in constants at most.

    Raises:
        ModesDifferError: they do not; names the first place where they part.
    """
    pairs = list(zip(train.graph.nodes, evaluation.graph.nodes))
    parted = [(node, other) for node, other in pairs if _skeleton(node) != _skeleton(other)]
    if train.output != evaluation.output:
        parted.append(pairs[-1])
    if not parted:
        return
    places = [item.meta for item in parted[0] if "scope" in item.meta]
    both = itertools.takewhile(
        lambda calls: calls[0] == calls[1], zip(train.calls, evaluation.calls)
    )
    entered = {call for call, _ in both}
    # A branch is taken by the innermost running module that both modes have entered.
    stacks = [[call for call in meta["calls"] if call in entered] for meta in places]
    scope = max(stacks, key=len)[-1].name if stacks else ""
    lines = " and ".join(dict.fromkeys(meta["location"] for meta in places)) or "the end"
    text = f"forward runs different operators in train and in eval mode, first at {lines}"
    raise ModesDifferError(text, scope)


def _skeleton(node: fx.Node) -> Any:
    """What must be the same in both modes: everything but the constants."""
    target = "output" if node.op == "output" else node.target
    arguments = fx.node.map_aggregate(
        (node.args, node.kwargs), lambda arg: arg.name if isinstance(arg, fx.Node) else None
    )
    return node.op, target, node.name, arguments, node.meta.get("switches")
