"""Replaces changes in place by new values, which later readers use.

A change of a slice is one of what it is of: after ``y[:, 0] = x`` readers of ``y`` read
``y' = y.select_scatter(x, 1, 0)``. Views of a value that was changed are taken anew from what it
became when they are read again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from lightning_gpp.spmd.run.operator_calls import Name

Call = Callable[[torch._ops.OpOverload, Mapping[str, Any]], Name]
"""Adds the call of an operator, and gives the name of the one value that it makes."""

_SCATTERS = {
    "aten::slice": torch.ops.aten.slice_scatter.default,
    "aten::select": torch.ops.aten.select_scatter.default,
}


class _View(NamedTuple):
    """How a value is taken from another one, which is the argument of the name ``role``."""

    target: torch._ops.OpOverload
    given: Mapping[str, Any]
    role: str

    @property
    def base(self) -> Name:
        base: Name = self.given[self.role]
        return base

    def of(self, base: Name) -> _View:
        return self._replace(given={**self.given, self.role: base})


class PresentNames:
    """The current names of values.

    Args:
        call: see there.
    """

    def __init__(self, call: Call) -> None:
        self._call, self._renamed, self._views = call, dict[Name, Name](), dict[Name, _View]()
        self._shared = set[Name]()  # their memory is shared in a way that is not followed

    def present(self, name: Name) -> Name:
        """The name of what a value is now."""
        while name in self._renamed:
            name = self._renamed[name]
        view = self._views.get(name)
        if view is not None and (base := self.present(view.base)) != view.base:
            view, old = view.of(base), name
            name = self._renamed[old] = self._call(view.target, view.given)
            self._views[name] = view
        return name

    def note_view(
        self, target: torch._ops.OpOverload, given: Mapping[str, Any], role: str, made: list[Name]
    ) -> None:
        """Notes that what an operator made shares the memory of one of its arguments."""
        view = _View(target, given, role)
        if len(made) == 1:
            self._views[made[0]] = view
        else:
            self._shared |= {view.base, *made}

    def roots(self, name: Name) -> list[Name] | None:
        """A value and what it is a slice of, down to the one that is none.

        None if it is not known how a change of it changes the others.
        """
        view, found = self._views.get(name), [name]
        while view is not None and view.target._schema.name in _SCATTERS:
            found.append(view.base)
            view = self._views.get(view.base)
        return None if view is not None or self._shared.intersection(found) else found

    def change(self, name: Name, new: Name) -> None:
        """The value ``new`` takes the place of another one."""
        self._renamed[name] = new
        if (view := self._views.get(name)) is not None:
            scatter = _SCATTERS[view.target._schema.name]
            whole = self._call(scatter, {**view.given, "src": new})
            self._views[new] = view.of(whole)
            self.change(view.base, whole)
