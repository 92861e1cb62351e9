"""Capture with ``torch.fx``: runs forward on symbols; the first choice where it works."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_gpp.capture.checks.generators import Generators
from lightning_gpp.capture.errors import CaptureError
from lightning_gpp.capture.tracing.leaves import LeafPolicy
from lightning_gpp.capture.tracing.trace import Names, Recorder, Trace
from lightning_gpp.capture.tracing.whole_functions import whole_functions
from lightning_gpp.capture.values.arguments import Arguments
from lightning_gpp.capture.values.structure import Structure, flatten, leaves_of


def trace_symbolically(
    module: nn.Module, arguments: Arguments, policy: LeafPolicy, device: torch.device
) -> Trace:
    """Traces ``module.forward`` in the mode the module is in.

    Args:
        module: whose forward is traced.
        arguments: of it.
        policy: which sub-modules stay whole.
        device: that the module runs on.

    Raises:
        Exception: whatever the user's code raises when it meets symbols instead of tensors.
    """
    if arguments.structure.has_graphs:
        raise CaptureError("a graph object tells its sizes only when it holds real tensors")
    tracer = _FxTracer(module, arguments, policy)
    generators = Generators(device)
    with whole_functions(module, tracer.whole):
        graph = tracer.trace(module)
    tracer.recorder.draws.check("")
    if generators.have_drawn():
        raise CaptureError("random numbers that depend on no input would be frozen into the graph")
    assert tracer.output is not None
    return Trace(graph, tracer.output, tuple(tracer.recorder.entered))


class _FxTracer(fx.Tracer):
    """fx's tracer with our leaves, our arguments and no constants left on the user's module."""

    def __init__(self, module: nn.Module, arguments: Arguments, policy: LeafPolicy) -> None:
        super().__init__()
        self.arguments, self.policy = arguments, policy
        self.names = Names.of(module)
        self.recorder = Recorder()
        self.output: Structure | None = None

    def whole(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A library function that becomes one node where it meets a symbol."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not any(isinstance(leaf, fx.Proxy) for leaf in leaves_of((args, kwargs))):
                return function(*args, **kwargs)
            return self.create_proxy("call_function", function, args, kwargs)

        return call

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self.policy.is_leaf(m, module_qualified_name)

    def path_of_module(self, mod: nn.Module) -> str:
        if id(mod) not in self.names.modules:
            raise CaptureError(f"{type(mod).__name__} is called but no registered sub-module")
        return self.names.modules[id(mod)]

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if id(m) not in self.names.modules and next(m.parameters(), None) is None:
            return forward(*args, **kwargs)  # made on the spot, such as nn.ReLU()(x)
        with self.recorder.inside(self.path_of_module(m)):
            return super().call_module(m, forward, args, kwargs)

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        symbols = {
            name: self.create_proxy("placeholder", name, (), {})
            for name in self.arguments.names
            if name is not None
        }

        def flat_forward(root: nn.Module) -> tuple[Any, ...]:
            args, kwargs = self.arguments.rebuild(symbols)
            leaves, self.output = flatten(root.forward(*args, **kwargs))
            return tuple(leaves)

        flat_forward.__signature__ = inspect.Signature()  # type: ignore[attr-defined]
        return flat_forward, [self.root]

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        return self.recorder.mark(super().create_node(*args, **kwargs))

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor):
            name = self.names.of_tensor(a)
            return a if name is None else self.create_node("get_attr", name, (), {})
        try:
            return super().create_arg(a)
        except NotImplementedError:
            return a

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        name = self.names.of_tensor(attr_val) if isinstance(attr_val, Tensor) else None
        if name is None:
            return attr_val
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy("get_attr", name, (), {})
        return parameter_proxy_cache[name]
