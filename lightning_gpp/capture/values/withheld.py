"""Outputs that a pipeline does not hand out: objects with tensors hidden inside.

``transformers`` models return a key-value cache of all their layers, as long as
``config.use_cache`` is true. Training does not read it, and bringing the tensors of every layer to
the last stage would cost more than all else. So a stand-in takes the place of such an object in
what forward returns; whoever does read it gets an error that says what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_gpp.capture.values.structure import flatten, path_text

_DEPTH = 4  # EncoderDecoderCache -> cache -> list of layers -> layer -> tensor


class Withheld:
    """Stands for an output that stays in the pipeline.

    Any use raises a RuntimeError; comparing, printing, copying and pickling work.
    """

    def __init__(self, kind: str, path: str) -> None:
        self.__dict__["kind"], self.__dict__["path"] = kind, path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols that Python looks for: copy, pickle, numpy
            raise AttributeError(name)
        return self._refuse()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Withheld) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.kind, self.path))

    def __repr__(self) -> str:
        return f"<{self.kind} {self.path!r}, not handed out by the pipeline>"

    def _refuse(self, *_: Any) -> NoReturn:
        raise RuntimeError(
            f"the pipelined forward does not hand out its output {self.path!r}, a {self.kind}: an "
            "object with tensors inside that is no container. Return its tensors from forward, in "
            "a tuple, dict or dataclass. (A key-value cache of transformers is not for training: "
            "set config.use_cache=False.)"
        )

    __bool__ = __len__ = __iter__ = __getitem__ = __call__ = _refuse


def withhold(output: Any) -> Any:
    """``output`` with a stand-in for every object that hides tensors.

    >>> from types import SimpleNamespace
    >>> import torch
    >>> withhold({"y": 1, "cache": SimpleNamespace(keys=torch.ones(1))})
    {'y': 1, 'cache': <SimpleNamespace 'cache', not handed out by the pipeline>}
    """
    leaves, structure = flatten(output)
    kept = [
        Withheld(type(leaf).__name__, path_text(path)) if hides_tensors(leaf) else leaf
        for path, leaf in zip(structure.paths(), leaves, strict=True)
    ]
    changed = any(new is not old for new, old in zip(kept, leaves, strict=True))
    return structure.unflatten(kept) if changed else output


def withheld_outputs(output: Any) -> list[Withheld]:
    """The stand-ins in an output."""
    return [leaf for leaf in flatten(output)[0] if isinstance(leaf, Withheld)]


def hides_tensors(value: Any, depth: int = _DEPTH) -> bool:
    """Whether tensors are reached through attributes and containers of a leaf."""
    numbers = (torch.SymInt, torch.SymFloat)  # of a trace
    if isinstance(value, (Tensor, nn.Module, type, Withheld, *numbers)) or not depth:
        return False
    return any(
        isinstance(item, Tensor) or hides_tensors(item, depth - 1) for item in _inside(value)
    )


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    return vars(value).values() if hasattr(value, "__dict__") else ()
