"""What goes into the captured forward, and what of its output a pipeline does not hand out.

Tensors among the arguments become the inputs of the graph. Everything else (flags, None, numbers)
is frozen at capture and must be the same at every later call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_gpp.capture.errors import CaptureError
from lightning_gpp.capture.values.structure import (
    Structure,
    flatten,
    is_graph,
    path_text,
)

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class OtherFormError(ValueError):
    """A call of another form than the captured one: other containers, or None and tensors swapped.

    Such a forward computes something else, which has to be captured by itself.
    """


@dataclass(frozen=True, slots=True)
class Arguments:
    """How the arguments of one forward are laid out.

    Attributes:
        signature: of the forward, without ``self``.
        form: the same, where what the call did not give by position is keyword-only.
        fills_defaults: whether a default may be passed as if the call had given it. A decorator
            may tell the two apart.
        structure: of the dict of bound arguments.
        paths: a readable name per leaf (``batch_image``).
        names: name of the graph input per leaf; None where the leaf is frozen.
        frozen: the frozen leaves by position.
        dtypes: element type of the tensor leaves by input name.
    """

    signature: Signature
    form: Signature
    fills_defaults: bool
    structure: Structure
    paths: tuple[str, ...]
    names: tuple[str | None, ...]
    frozen: Mapping[int, Any]
    dtypes: Mapping[str, torch.dtype]

    @classmethod
    def of(cls, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        """The layout of ``module.forward(*args, **kwargs)``.

        Raises:
            CaptureError: no argument is a tensor, or an object hides tensors.
        """
        signature = _signature(module.forward, args, kwargs)
        is_decorated = any(hasattr(module.forward, n) for n in ("__wrapped__", "__signature__"))
        leaves, structure = _flat(signature, args, kwargs, not is_decorated)
        paths = []
        for steps in structure.paths():
            is_extra = signature.parameters[steps[0].key].kind is Parameter.VAR_KEYWORD
            paths.append(path_text(steps[1:] if is_extra and len(steps) > 1 else steps))
        namer = fx.Graph()  # makes names that graphs accept: unique, no built-in, no keyword
        names, frozen, dtypes = list[str | None](), dict[int, Any](), dict[str, torch.dtype]()
        for position, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
            if isinstance(leaf, Tensor):
                if leaf.is_sparse or leaf.layout in _COMPRESSED:
                    raise CaptureError(
                        f"argument {path!r} is a sparse tensor, which cannot be cut. Pass its "
                        "indices and values instead (for a graph, edge_index and edge_weight)"
                    )
                name = namer.placeholder(path).name
                names.append(name)
                dtypes[name] = leaf.dtype
                continue
            if hides_tensors(leaf) or is_graph(leaf):
                raise CaptureError(
                    f"argument {path!r} is a {type(leaf).__name__}, which has tensors but is not "
                    "a known container. Pass its tensors as separate arguments (forward(x, "
                    "edge_index)), or in a dict or dataclass"
                )
            names.append(None)
            frozen[position] = leaf
        if not dtypes:
            raise CaptureError(
                f"{type(module).__name__}.forward was called without a tensor argument; a "
                "pipeline needs at least one"
            )
        layout = (structure, tuple(paths), tuple(names), frozen, dtypes)
        return cls(signature, _with_positions(signature, args), not is_decorated, *layout)

    def tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Input name -> tensor of a later call with the same layout.

        Raises:
            OtherFormError: the call has other containers, or None, a flag or a text where there was
                another or a tensor.
            ValueError: the call differs in something else that was frozen at capture.
        """
        leaves, structure = self.flat(args, kwargs)
        if structure != self.structure:
            raise OtherFormError(_other_containers(self.structure, structure))
        tensors = {}
        for name, path, expected, leaf in zip(
            self.names, self.paths, self._leaves(self.dtypes), leaves, strict=True
        ):
            if name is None:
                _check_frozen(path, expected, leaf)
                continue
            was = f"argument {path!r} was %s when the model was captured, got"
            if not isinstance(leaf, Tensor):
                kind = OtherFormError if _tells_form(leaf) else ValueError
                raise kind(f"{was % 'a tensor'} {leaf!r}: pass a tensor every time")
            if leaf.dtype != expected:
                text = was % expected
                raise ValueError(f"{text} {leaf.dtype}: convert it before the call")
            tensors[name] = leaf
        return tensors

    def flat(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Structure]:
        """The leaves of a call, one per entry of :attr:`names`, and their structure."""
        return _flat(self.signature, args, kwargs, self.fills_defaults)

    def rebuild(self, tensors: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(args, kwargs)`` for the forward from one value per graph input."""
        leaves = self._leaves(tensors)
        bound = inspect.BoundArguments(self.form, self.structure.unflatten(leaves))
        return bound.args, bound.kwargs

    def _leaves(self, tensors: Mapping[str, Any]) -> list[Any]:
        frozen = self.frozen
        return [frozen[i] if name is None else tensors[name] for i, name in enumerate(self.names)]


def _other_containers(expected: Structure, got: Structure) -> str:
    was, now = (
        {step.key: each for step, each in zip(given.steps, given.children, strict=True)}
        for given in (expected, got)
    )
    name = next(name for name in [*was, *now] if was.get(name) != now.get(name))
    return (
        f"argument {name!r} of forward was {was.get(name, 'left out')} when the model was "
        f"captured, and is {now.get(name, 'left out')}: use the same containers, keys and lengths "
        "every time"
    )


def _check_frozen(path: str, expected: Any, leaf: Any) -> None:
    if _same(expected, leaf):
        return
    got = "a tensor" if isinstance(leaf, Tensor) else repr(leaf)
    kind = OtherFormError if _tells_form(expected) and _tells_form(leaf) else ValueError
    raise kind(
        f"argument {path!r} was {expected!r} when the model was captured, which is fixed in its "
        f"graph, got {got}. Pass the same value in all steps, pass a tensor from the first call "
        "on, or pipeline a sub-module by GraphPipeStrategy(module=...)"
    )


def _tells_form(leaf: Any) -> bool:
    """Whether an argument has few values, of which each may be a form of call of its own."""
    return leaf is None or isinstance(leaf, bool | str | Tensor)


def _signature(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Signature:
    """With the names of the function itself, unless its decorator takes other arguments."""
    signature = inspect.signature(forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return inspect.signature(forward, follow_wrapped=False)
    return signature


def _with_positions(signature: Signature, args: Sequence[Any]) -> Signature:
    given = signature.bind_partial(*args).arguments
    parameters = [
        each.replace(kind=Parameter.KEYWORD_ONLY)
        if each.kind is Parameter.POSITIONAL_OR_KEYWORD and each.name not in given
        else each
        for each in signature.parameters.values()
    ]
    return signature.replace(parameters=sorted(parameters, key=lambda each: each.kind))


def _flat(
    signature: Signature, args: Sequence[Any], kwargs: Mapping[str, Any], fills_defaults: bool
) -> tuple[list[Any], Structure]:
    bound = signature.bind(*args, **kwargs)
    if fills_defaults:
        bound.apply_defaults()
    return flatten(dict(bound.arguments))


def _same(expected: Any, got: Any) -> bool:
    if expected is got:
        return True
    if type(expected) is not type(got):
        return False
    try:
        return bool(expected == got) or (expected != expected and got != got)
    except (RuntimeError, TypeError, ValueError):
        return False


# Objects with tensors hidden inside, among the outputs -------------------------------------------
#
# ``transformers`` models return a key-value cache of all their layers, as long as
# ``config.use_cache`` is true. Training does not read it, and bringing the tensors of every layer
# to the last stage would cost more than all else. So None takes its place in what forward returns.


_DEPTH = 4  # EncoderDecoderCache -> cache -> list of layers -> layer -> tensor


def withhold(output: Any) -> tuple[Any, list[str]]:
    """``output`` with None for every object that hides tensors, and what these are.

    >>> from types import SimpleNamespace
    >>> import torch
    >>> withhold({"y": 1, "cache": SimpleNamespace(keys=torch.ones(1))})
    ({'y': 1, 'cache': None}, ['cache (SimpleNamespace)'])
    """
    leaves, structure = flatten(output)
    paths = list(structure.paths())
    hidden = [i for i, leaf in enumerate(leaves) if hides_tensors(leaf)]
    if not hidden:
        return output, []
    names = [f"{path_text(paths[i])} ({type(leaves[i]).__name__})" for i in hidden]
    for i in hidden:
        leaves[i] = None
    return structure.unflatten(leaves), names


def hides_tensors(value: Any, depth: int = _DEPTH) -> bool:
    """Whether tensors are reached through attributes and containers of a leaf."""
    numbers = (torch.SymInt, torch.SymFloat)  # of a trace
    if isinstance(value, (Tensor, nn.Module, type, *numbers)) or not depth:
        return False
    inside = value if isinstance(value, Mapping | list | tuple) else getattr(value, "__dict__", ())
    items = inside.values() if isinstance(inside, Mapping) else inside
    return any(isinstance(item, Tensor) or hides_tensors(item, depth - 1) for item in items)
