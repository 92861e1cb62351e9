"""A hash of what a module would compute, its weights left out.

The fingerprint of a captured model is that of its graph, in which leaf modules are names. What they
do is in their types, their code, and their settings.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch import nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def module_content(module: nn.Module) -> str:
    """Equal in every process for modules of equal types, code, settings and training flags.

    Settings are the plain attributes (numbers, texts, and tuples and lists of them) and what a
    module's ``repr`` shows. Functions that methods call are not looked into.
    """
    digest = hashlib.sha256()
    code = {kind: _code_of(kind) for kind in {type(part) for part in module.modules()}}
    for name, part in module.named_modules():
        kind, text = type(part), re.sub(r" at 0x[0-9a-f]+", "", part.extra_repr())
        settings = sorted(
            (key, value)
            for key, value in vars(part).items()
            if not key.startswith("_") and key != "training" and _is_plain(value)
        )
        digest.update(f"{name} {kind.__module__}.{kind.__qualname__} {part.training}\n".encode())
        digest.update(f"{text} {settings}\n{code[kind]}".encode())
    return digest.hexdigest()[:32]


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN


def _code_of(kind: type) -> str:
    """Hash of the functions of a module type and its bases, torch's own left out."""
    digest = hashlib.sha256()
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] not in ("torch", "builtins"):
            for name, member in sorted(vars(base).items()):
                code = getattr(getattr(member, "__func__", member), "__code__", None)
                if isinstance(code, CodeType):
                    digest.update(f"{name} {' '.join(_texts(code))}\n".encode())
    return digest.hexdigest()


def _texts(code: CodeType) -> Iterator[str]:
    """What a function does; line numbers and file names play no part."""
    yield f"{code.co_code.hex()} {code.co_names} {code.co_varnames}"
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _texts(constant)
        elif isinstance(constant, frozenset):  # in an order that changes from process to process
            yield f"{sorted(map(repr, constant))}"
        else:
            yield repr(constant)
