"""Hooks of the user's on calls of modules that only look on: rehearsals run without them.

Whether a hook changes something (what it returns, tensors, its module) only a call shows. So they
run in the first rehearsal of a model, are left out of all others, and run again in real calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from lightning_gpp.capture.values.structure import tensors_of
from lightning_gpp.common.instance_attribute import replaced
from lightning_gpp.common.tensor_places import num_changes

_LIBRARIES = ("torch.", "torch_geometric.", "transformers.")

Hook = Callable[..., Any]

_KNOWN = weakref.WeakKeyDictionary[nn.Module, list[Hook]]()


def observers_of(module: nn.Module) -> tuple[tuple[str, int], ...]:
    """The hooks that only look on: qualified names of modules, and which of their hooks it is."""
    return tuple(
        (name, number)
        for name, part in module.named_modules()
        for number, (_, _, hook) in enumerate(_hooks(part))
        if hook is _left_out or hook in _KNOWN.get(part, ())
    )


def take_observers(module: nn.Module, places: Sequence[tuple[str, int]]) -> None:
    """Takes for such what another process found."""
    for name, number in places:
        part = module.get_submodule(name)
        _KNOWN.setdefault(part, []).append(_hooks(part)[number][2])


def without_observers(module: nn.Module) -> AbstractContextManager[None]:
    """The body runs without hooks that only look on."""
    return replaced(
        [
            (table, key, _left_out)
            for part in module.modules()
            for table, key, hook in _hooks(part)
            if hook in _KNOWN.get(part, ())
        ]
    )


@contextmanager
def watched_hooks(module: nn.Module) -> Iterator[None]:
    """Finds hooks that only look on among those that run in the body."""
    only_look: dict[tuple[nn.Module, Hook], bool] = {}

    def watch(part: nn.Module, hook: Hook) -> Hook:
        def watched(*args: Any, **kwargs: Any) -> Any:
            before = _state(part, args)
            answer = hook(*args, **kwargs)
            only_looks = answer is None and _state(part, args) == before
            only_look[part, hook] = only_looks and only_look.get((part, hook), True)
            return answer

        return watched

    hooks = ((part, *each) for part in module.modules() for each in _hooks(part))
    with replaced([(table, key, watch(part, hook)) for part, table, key, hook in hooks]):
        yield
    for (part, hook), only_looks in only_look.items():
        if only_looks:
            _KNOWN.setdefault(part, []).append(hook)


def _left_out(*_: Any, **__: Any) -> None:
    """Stands for a hook that only looks on."""


def _hooks(part: nn.Module) -> list[tuple[Any, Any, Hook]]:
    """The user's own hooks on calls of a module, each with its table and its key in that."""
    return [
        (table, key, hook)
        for table in (part._forward_pre_hooks, part._forward_hooks)
        for key, hook in table.items()
        if not f"{getattr(hook, '__module__', '')}.".startswith(_LIBRARIES)
    ]


def _state(part: nn.Module, args: Any) -> Any:
    """Another one after a change of a module, or of the tensors that a hook is given."""
    tensors = [*tensors_of(args), *part.parameters(), *part.buffers()]
    held = (vars(part), part._parameters, part._buffers)
    names = [(name, id(value)) for each in held for name, value in each.items()]
    return [(id(t), num_changes(t)) for t in tensors], names
