"""Prints every error and warning of the package, from its source: ``python messages.py [WORD]``."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[2] / "lightning_gpp"
WARNINGS = ("warn", "warning", "rank_zero_warn", "rank_zero_info", "info", "error")


class Message(NamedTuple):
    """What a user may read.

    Attributes:
        place: file in the package and line.
        kind: of the error, or how it is told.
        text: with ``{…}`` for what is filled in.
    """

    place: str
    kind: str
    text: str


def messages() -> Iterator[Message]:
    """All of the package, by file."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        constants = {
            target.id: _text(node.value, {})
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            call = node.exc if isinstance(node, ast.Raise) else node
            if not isinstance(call, ast.Call) or not call.args:
                continue
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            is_raised = isinstance(node, ast.Raise)
            if is_raised or name in WARNINGS:
                text = _text(call.args[0], constants)
                if " " in text:
                    place = f"{path.relative_to(PACKAGE)}:{call.lineno}"
                    yield Message(place, name, text)


def _text(node: ast.expr, constants: dict[str, str]) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(part, constants) for part in parts)
        case ast.FormattedValue():
            return "{" + ast.unparse(node.value) + "}"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left, constants) + _text(right, constants)
        case ast.IfExp(body=body, orelse=other):
            return f"{_text(body, constants)} | {_text(other, constants)}"
        case ast.Name(id=name):
            return constants.get(name, "{" + name + "}")
        case ast.Call(func=ast.Attribute(value=template, attr="format")):
            return _text(template, constants)
    return "{" + ast.unparse(node) + "}"


if __name__ == "__main__":
    for place, kind, text in messages():
        if not sys.argv[1:] or sys.argv[1] in text:
            sys.stdout.write(f"{place}\t{kind}\t{' '.join(text.split())}\n")
