"""What a trace fixed, compared at every call with what it is now."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_gpp.capture.errors import GuardError
from lightning_gpp.capture.tracing.reads import ABSENT, PLAIN, Read, content_of, owner_of


class Frozen:
    """What a trace fixed: what forward read, and which modules and hooks it went through.

    Args:
        module: whose forward was traced.
        reads: what it read.
        leaves: paths of the modules that were not looked into.
    """

    def __init__(
        self, module: nn.Module, reads: Sequence[Read], leaves: Sequence[str] = ()
    ) -> None:
        self._module = module
        self._reads = [(owner_of(module, read), read, read.is_mode) for read in reads]
        inside = tuple(f"{leaf}." for leaf in leaves)
        named = dict(module.named_modules())
        parts = {n: p for n, p in named.items() if not f"{n}.".startswith(inside)}
        del parts[""]  # its hooks run around every call
        self._leaves = {n: p for n, p in named.items() if f"{n}.".startswith(inside)}
        self._parts = {n: p for n, p in parts.items() if not isinstance(p, torch.jit.ScriptModule)}
        self._kept = self._now()

    def check(self) -> None:
        """Checks that all is as it was.

        Raises:
            GuardError: something changed; the text names it and says what to do.
        """
        for read, now in self._changed():
            before, after = (ABSENT if x == ABSENT else repr(x) for x in (read.value, now))
            was = f"was {before} when the model was captured and is {after} now"
            if not isinstance(now, PLAIN):
                was = "is not what it was when the model was captured"
            raise GuardError(
                f"forward reads self.{read.place}, which {was}; the captured graph has the old "
                "value. Make it a buffer, pass it as a tensor argument, or keep its module whole: "
                "leaf_modules=[...]",
            )
        now = self._now()
        if now == self._kept:
            return
        paths = ["", *self._parts]
        path = next(n for n, kept, each in zip(paths, self._kept, now, strict=True) if kept != each)
        raise GuardError(
            f"sub-modules, hooks or the forward of {path or 'the pipelined module'} were replaced "
            "after the model was captured, whose graph has the old ones. Change them before the "
            "training, or keep this module whole: leaf_modules=[...]"
        )

    @contextmanager
    def keeping_leaves(self) -> Iterator[None]:
        """The body must leave the attributes of modules that stages call as a whole as they are.

        Raises:
            ValueError: it changed one.
        """
        before = [list(vars(p).values()) for p in self._leaves.values()]
        yield
        for (path, part), was in zip(self._leaves.items(), before, strict=True):
            now = list(vars(part).values())
            if len(now) != len(was) or not all(map(operator.is_, was, now)):
                raise ValueError(
                    f"training_step changes an attribute of {path}, which other ranks do not hear "
                    "of within the mini-batch. Change it in on_train_batch_start, or use "
                    "schedule='gpipe'"
                )

    def is_as_read(self) -> bool:
        """Whether all that was read is as it was."""
        return not any(True for _ in self._changed())

    def _changed(self) -> Iterator[tuple[Read, Any]]:
        """What has another value now, with that; in evaluation no module is in training."""
        for owner, read, is_mode in self._reads:
            now, then = getattr(owner, read.name, ABSENT), read.value
            if now.__class__ not in PLAIN:
                now = content_of(now)
            if is_mode and not self._module.training:
                then = False
            if now != then:
                yield read, now

    def _now(self) -> list[Any]:
        # Without a call for each of them, as there may be hundreds.
        return [
            dict(self._module._modules.items()),
            *[
                (
                    *(p.__class__, dict(p._modules.items()), p.__dict__.get("forward")),
                    *([*p._forward_hooks], [*p._forward_pre_hooks]),
                )
                for p in self._parts.values()
            ],
        ]
