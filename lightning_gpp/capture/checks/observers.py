"""Finds modules whose hooks only observe; rehearsals leave such hooks out.

Whether a hook changes something (what it returns, tensors, its module) only a call shows. So all
run in the first rehearsal of a model, and those that only look on in real calls alone from then on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from lightning_gpp.capture.values.structure import tensors_of
from lightning_gpp.common.instance_attribute import replaced
from lightning_gpp.common.tensor_places import num_changes

_LIBRARIES = ("torch.", "torch_geometric.", "transformers.")

OBSERVED = weakref.WeakSet[nn.Module]()
"""Modules whose hooks are found to look on only."""


def without_observers(module: nn.Module) -> AbstractContextManager[None]:
    """The body runs without hooks that only look on."""
    parts = (part for part in module.modules() if part in OBSERVED)
    return replaced([(*place, _look_away) for part in parts for *place, _ in _hooks(part)])


@contextmanager
def watched_hooks(module: nn.Module) -> Iterator[None]:
    """Finds out which hooks only look on, of those that run in the body."""
    only_look: dict[nn.Module, bool] = {}

    def watch(part: nn.Module, hook: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            before = _state(part, args)
            answer = hook(*args, **kwargs)
            changes = answer is not None or _state(part, args) != before
            only_look[part] = not changes and only_look.get(part, True)
            return answer

        return watched

    hooks = ((part, *each) for part in module.modules() for each in _hooks(part))
    with replaced([(table, key, watch(part, hook)) for part, table, key, hook in hooks]):
        yield
    OBSERVED.update(part for part, looks in only_look.items() if looks)


def _hooks(part: nn.Module) -> list[tuple[Any, Any, Callable[..., Any]]]:
    """The user's own hooks on calls of a module, each with its table and its key in that."""
    return [
        (table, key, hook)
        for table in (part._forward_pre_hooks, part._forward_hooks)
        for key, hook in table.items()
        if not f"{getattr(hook, '__module__', '')}.".startswith(_LIBRARIES)
    ]


def _look_away(*_: Any, **__: Any) -> None:
    """Stands for a hook that only looks on."""


def _state(part: nn.Module, args: Any) -> Any:
    """Another one after a change of a module, or of the tensors that a hook is given."""
    tensors = [*tensors_of(args), *part.parameters(), *part.buffers()]
    held = (vars(part), part._parameters, part._buffers)
    names = [(name, id(value)) for each in held for name, value in each.items()]
    return [(id(t), num_changes(t)) for t in tensors], names
