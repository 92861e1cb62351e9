"""Operators that change a tensor in place, as operators that make a new one.

On several devices a value may be there in several placements, so that a change in place would
change one of them. ``x.relu_()`` becomes ``x' = x.relu()`` and later readers of ``x`` read ``x'``.
Buffers alone are changed in place: they are what the change is for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_gpp.spmd.run.operator_calls import Operand


@dataclass(slots=True)
class InPlace:
    """What was changed so far.

    Attributes:
        renamed: value -> the one that has its place after a change.
        family: value -> the values that share its memory, by a number.
    """

    renamed: dict[str, str] = field(default_factory=dict)
    family: dict[str, int] = field(default_factory=dict)
    _pending: str | None = None

    def now(self, name: str) -> str:
        """The value that a name stands for now."""
        while name in self.renamed:
            name = self.renamed[name]
        return name

    def out_of_place(
        self,
        target: torch._ops.OpOverload,
        arguments: Mapping[str, Any],
        sources: Mapping[str, tuple[str, Any]],
    ) -> tuple[torch._ops.OpOverload, str | None]:
        """The operator that makes a new tensor, and the name of the one it stands for.

        Raises:
            ValueError: it changes a parameter, an argument, or memory that a view shares.
        """
        written = [
            argument.name
            for argument in target._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if not written or target._schema.name.startswith("aten::batch_norm"):
            return target, None
        (argument,) = written
        changed: str = arguments[argument].value
        source = sources.get(changed, ("", None))[0]
        if source == "buffer":
            return target, None
        if source:
            raise ValueError(
                f"changes the {source} {changed!r} in place; write what it becomes to a new name"
            )
        if any(self._shares(changed, other) for other in self.family if other != changed):
            raise ValueError(
                f"changes {changed!r} in place, whose memory other tensors view; write what it "
                "becomes to a new name"
            )
        namespace, name = target._schema.name.split("::")
        overloads = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
        found = getattr(overloads, target._overloadname, None)
        if found is None:
            raise ValueError(f"changes {changed!r} in place ({target}); write it out of place")
        return found, changed

    def _shares(self, one: str, other: str) -> bool:
        return one in self.family and self.family[one] == self.family[other]

    def note(
        self,
        target: torch._ops.OpOverload,
        arguments: Mapping[str, Any],
        reads: Sequence[str],
        makes: Sequence[str],
        changed: str | None,
    ) -> None:
        """Notes what a call makes: in the place of what it changed, or a view of what it reads."""
        if changed is not None:
            (self.renamed[changed],) = makes
            return
        for argument in target._schema.arguments:
            given = arguments.get(argument.name)
            if argument.alias_info is None or not isinstance(given, Operand):
                continue
            read = reads[given.index]
            number = self.family.setdefault(read, len(self.family))
            self.family.update(dict.fromkeys(makes, number))
