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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from lightning_gpp.capture.errors import REMEDY, CaptureError, is_foreign, user_location


class KeepWholeError(CaptureError):
    """A module decides something that a trace would freeze.

    Attributes:
        scope: qualified name of the innermost module that decides; empty for the captured one.
        on_data: whether it decides by what is in its arguments, be it by other samples.
    """

    def __init__(self, message: str, scope: str, *, on_data: bool = False) -> None:
        super().__init__(message)
        self.scope, self.on_data = scope, on_data


class DrawError(KeepWholeError):
    """A forward draws random numbers outside of torch."""

    def __init__(self, scope: str) -> None:
        super().__init__("forward draws random numbers outside of torch", scope)


class HostDraws:
    """Notices random numbers that Python code draws with ``random`` or numpy while it is traced."""

    def __init__(self) -> None:
        self._state = _host_state()

    def check(self, scope: str) -> None:
        """Checks that nothing was drawn since the last check.

        Raises:
            DrawError: something was, by the module ``scope``.
        """
        if _host_state() != self._state:
            raise DrawError(scope)

    @contextmanager
    def checked(self, scope: str) -> Iterator[None]:
        """Checks at the end, and where the body fails: what was drawn may be why.

        A size that was replaced for the trace is nothing that numpy could take, for example.

        Raises:
            DrawError: something was drawn, by the module ``scope``.
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
        isinstance(node, ast.Assert | ast.If)
        and _is_at(node.test, line)
        and (isinstance(node, ast.Assert) or isinstance(node.body[-1], ast.Raise))
        and not any(isinstance(part, ast.BoolOp | ast.IfExp) for part in ast.walk(node.test))
        for line, node in _nodes_of(location)
    )


@functools.cache
def only_shows(location: str) -> bool:
    """Whether the statement at ``file:line`` prints or logs, and does nothing else.

    >>> only_shows("unknown line")
    False
    """
    return any(
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and _is_at(node, line)
        and ast.unparse(node.value.func).rpartition(".")[2] in _SHOW
        for line, node in _nodes_of(location)
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


def line_of_draw(forward: Callable[[], Any]) -> str:
    """``file:line`` of the user's line during which ``forward`` first draws outside of torch."""
    state, last, found = _host_state(), "unknown line", list[str]()

    def watch(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal last
        if found or is_foreign(frame.f_code.co_filename):
            return None
        if _host_state() != state:
            found.append(last)
        last = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        forward()
    finally:
        sys.settrace(before)
    return found[0] if found else last


@contextmanager
def no_seeding(is_recording: Callable[[], bool]) -> Iterator[None]:
    """Refuses to change torch's random generator from Python, which no stage would do again.

    Args:
        is_recording: whether a call would be seen; leaf modules may do as they like.

    Raises:
        CaptureError: forward seeds the generator or sets its state.
    """
    names = ("manual_seed", "seed", "set_rng_state")
    places = (torch, torch.random)
    before: dict[tuple[Any, str], Any] = {
        (place, name): getattr(place, name) for place in places for name in names
    }

    def refuse(name: str) -> Callable[..., Any]:
        original = before[torch, name]

        def refused(*args: Any, **kwargs: Any) -> Any:
            if not is_recording():
                return original(*args, **kwargs)
            raise CaptureError(
                f"{user_location()} calls torch.{name} inside of forward, which would change what "
                f"other stages draw: {REMEDY}"
            )

        return refused

    try:
        for place, name in before:
            setattr(place, name, refuse(name))
        yield
    finally:
        for (place, name), function in before.items():
            setattr(place, name, function)


def _host_state() -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate()
    kind, keys, *rest = numpy.random.get_state()
    return random.getstate(), kind, keys.tobytes(), tuple(rest)
