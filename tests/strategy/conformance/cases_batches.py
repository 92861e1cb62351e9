"""Batches in every form that collate functions give them."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from conformance.case import Case, calls
from conformance.modules import CaseModule, data


class Pair(NamedTuple):
    """A named tuple."""

    x: Tensor
    y: Tensor


@dataclasses.dataclass
class Late:
    """A dataclass with a derived number, whose target is put in later."""

    x: Tensor
    note: str
    size: int = dataclasses.field(init=False)
    y: Tensor | None = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        self.size = len(self.x)


class Encoding(UserDict[str, Any]):
    """Mapping-like, with a memory of its own, as ``transformers.BatchEncoding`` is."""

    def __init__(self, items: dict[str, Any], origin: str) -> None:
        super().__init__(items)
        self.origin = origin

    def to(self, device: Any) -> Encoding:
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


class Opaque:
    """An object that can be moved, and no more."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def to(self, device: Any, **_: Any) -> Opaque:
        return Opaque(self.x.to(device), self.y.to(device))


def late(x: Tensor, y: Tensor) -> Late:
    batch = Late(x, "note")
    batch.y = y
    return batch


def items(x: Tensor, y: Tensor, into: Callable[..., Any]) -> Any:
    return into({"x": x, "y": y})


FORMS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Any, Any]]]] = {
    "dict": (lambda x, y: {"x": x, "y": y}, lambda b: (b["x"], b["y"])),
    "ordered dict": (lambda x, y: items(x, y, OrderedDict), lambda b: (b["x"], b["y"])),
    "default dict": (
        lambda x, y: items(x, y, lambda d: defaultdict(int, d)),
        lambda b: (b["x"], b["y"] + b["absent"]),
    ),
    "user dict": (
        lambda x, y: Encoding({"x": x, "y": y}, "here"),
        lambda b: (b["x"], b["y"] + len(b.origin) - 4),
    ),
    "named tuple": (Pair, lambda b: (b.x, b.y)),
    "nested": (
        lambda x, y: {"in": [(x[:, :2], {"rest": x[:, 2:]})], "out": Pair(y, y * 0)},
        lambda b: (torch.cat([b["in"][0][0], b["in"][0][1]["rest"]], 1), b["out"].x),
    ),
    "dataclass": (late, lambda b: (b.x[: b.size], b.y * (b.note == "note"))),
    "tuple per sample": (
        lambda x, y: (tuple(x.unbind(0)), tuple(y.unbind(0))),
        lambda b: (torch.stack(b[0]), torch.stack(b[1])),
    ),
    "samples of several lengths": (
        lambda x, y: ([row[: 3 + i % 2] for i, row in enumerate(x)], y),
        lambda b: (torch.stack([nn.functional.pad(r, (0, 5 - len(r))) for r in b[0]]), b[1]),
    ),
    "arrays": (
        lambda x, y: {"x": x.numpy(), "y": y, "z": np.float64(1), "n": np.array(2.0)},
        lambda b: (torch.as_tensor(b["x"]) * b["z"], b["y"] * float(b["n"]) / 2),
    ),
    "strings, None and scalars": (
        lambda x, y: (x, y, [f"{v:.3f}" for v in x[:, 0]], None, "name", torch.tensor(2.0), 3),
        lambda b: (
            b[0] * b[5] * len(b[4]) / 8,
            b[1] + torch.tensor([[float(v)] for v in b[2]]).to(b[1]) * (b[3] is None),
        ),
    ),
    "text only": (
        lambda x, y: {"x": [" ".join(map(str, row.tolist())) for row in x], "y": y.tolist()},
        lambda b: (
            torch.tensor([[float(v) for v in row.split()] for row in b["x"]]).double(),
            torch.tensor(b["y"]).double(),
        ),
    ),
}
"""Name -> (makes a batch of inputs and targets, gets them back)."""


class FormModule(CaseModule):
    """Reads batches of one form."""

    def __init__(self, form: str) -> None:
        super().__init__()
        _, self.read = FORMS[form]
        self.tells_size = form == "text only"  # Lightning finds none in a batch without tensors

    def loss(self, batch: Any) -> Tensor:
        x, y = self.read(batch)
        return super().loss((x.to(self.device), y.to(self.device)))

    def size(self, batch: Any) -> int | None:
        return len(self.read(batch)[0]) if self.tells_size else None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=self.size(batch))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch), batch_size=self.size(batch))


class OpaqueModule(CaseModule):
    """Trains and evaluates on objects."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch.x, batch.y))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=len(batch.x))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch), batch_size=len(batch.x))

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test_loss", self.loss(batch), batch_size=len(batch.x))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch.x)


def collate(form: str) -> Callable[[Sequence[Any]], Any]:
    make, _ = FORMS[form]
    return lambda samples: make(*default_collate(list(samples)))


def none_or_batch(samples: Sequence[Any]) -> Any:
    """Lightning takes no step for the former."""
    return default_collate(list(samples)) if float(samples[0][0].sum()) > 0 else None


NOT_CUT = (
    "text only",
    "tuple per sample",
    "samples of several lengths",
    "strings, None and scalars",
)
"""Batches without a tensor by which they could be cut, and lists with an item per sample."""

CASES = [
    *(
        Case(
            form,
            {"max_epochs": 1},
            module=lambda form=form: FormModule(form),
            data=data(collate=collate(form), num_samples=21),
            only_whole=form in NOT_CUT,
        )
        for form in FORMS
    ),
    Case(
        "None for some batches",
        {"max_epochs": 1, "limit_val_batches": 0},
        data=data(collate=none_or_batch, num_samples=21),
    ),
    Case(
        "objects",
        module=OpaqueModule,
        data=data(collate=lambda samples: Opaque(*default_collate(samples))),
        script=calls("fit", "test", "predict"),
        only_whole=True,
    ),
]
