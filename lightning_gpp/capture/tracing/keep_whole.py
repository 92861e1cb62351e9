"""Modules that must stay whole because their own Python decides what they compute.

Tracing freezes what Python decides. Where a decision can come out differently the next time (a
random number drawn by ``random`` or numpy, a number read out of a tensor, a branch on the data or
on the mode), the innermost module that takes it is kept as one operator, which decides anew at
every call. Only where the captured module itself decides is this an error.
"""

from __future__ import annotations

import ast
import functools
import linecache
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_gpp.capture.errors import REMEDY, CaptureError


class KeepWholeError(CaptureError):
    """A module decides something that a trace would freeze.

    Attributes:
        scope: qualified name of the innermost module that decides; empty for the captured one.
        on_data: whether it decides by what is in its arguments, be it by other samples.
    """

    def __init__(self, message: str, scope: str, *, on_data: bool = False) -> None:
        super().__init__(message)
        self.scope, self.on_data = scope, on_data


class HostDraws:
    """Notices random numbers that Python code draws with ``random`` or numpy while it is traced."""

    def __init__(self) -> None:
        self._state = _host_state()

    def check(self, scope: str) -> None:
        """Checks that nothing was drawn since the last check.

        Raises:
            KeepWholeError: something was, by the module ``scope``.
        """
        if _host_state() != self._state:
            raise KeepWholeError(
                "forward draws a random number outside of torch (random, numpy), which would be "
                "frozen into the graph: draw it with torch.rand(...) and compute with the tensor, "
                f"or {REMEDY}",
                scope,
            )

    @contextmanager
    def checked(self, scope: str) -> Iterator[None]:
        """Checks at the end, and where the body fails: what was drawn may be why.

        A size that was replaced for the trace is nothing that numpy could take, for example.

        Raises:
            KeepWholeError: something was drawn, by the module ``scope``.
        """
        try:
            yield
        except KeepWholeError:
            raise
        except Exception:
            self.check(scope)
            raise
        self.check(scope)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """What runs meanwhile (a leaf module) may draw."""
        try:
            yield
        finally:
            self._state = _host_state()


@functools.cache
def only_raises(location: str) -> bool:
    """Whether the statement at ``file:line`` is a check: it decides about an error only.

    Where it comes out differently than at capture, the module itself would raise.

    >>> only_raises("unknown line")
    False
    """
    return any(
        _is_at(node.test, line)
        and (isinstance(node, ast.Assert) or isinstance(node.body[-1], ast.Raise))
        and not any(isinstance(part, ast.BoolOp | ast.IfExp) for part in ast.walk(node.test))
        for line, node in _nodes_of(location)
        if isinstance(node, ast.Assert | ast.If)
    )


@functools.cache
def only_shows(location: str) -> bool:
    """Whether the statement at ``file:line`` prints or logs, and does nothing else.

    >>> only_shows("unknown line")
    False
    """
    return any(
        _is_at(node, line) and ast.unparse(node.value.func).rpartition(".")[2] in _SHOW
        for line, node in _nodes_of(location)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    )


_SHOW = frozenset({"print", "debug", "info", "warning", "error", "warn"})


def _nodes_of(location: str) -> Iterator[tuple[int, ast.AST]]:
    """The line of a ``file:line``, with every node of the file."""
    filename, _, line = location.rpartition(":")
    if line.isdecimal():
        try:
            tree = ast.parse("".join(linecache.getlines(filename)))
        except SyntaxError:  # no Python file, or not as it was
            return
        yield from ((int(line), node) for node in ast.walk(tree))


def _is_at(node: ast.expr | ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _host_state() -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate()
    kind, keys, *rest = numpy.random.get_state()
    return random.getstate(), kind, keys.tobytes(), tuple(rest)
