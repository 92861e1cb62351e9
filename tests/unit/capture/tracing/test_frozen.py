"""A captured forward notices what it would go on without: changed modules, functions, flags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as lp
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_gpp.capture import CapturedModel, CaptureError, capture


class Encoder(nn.Module):
    """Drops entries by a layer and by a function, which looks at the training flag."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(3, 3), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(self.drop(self.layer(x)), 0.0, self.training)


class Settings:
    """A plain object, which counts how often it was asked."""

    factor, num_asked = 1.0, 0

    def ask(self) -> float:
        self.num_asked += 1
        return self.factor


class Model(lp.LightningModule):
    """Layers in containers, a function as an attribute, an object with numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Dropout(0.0), nn.Tanh()))
        self.encoder, self.head = Encoder(), nn.Linear(3, 2)
        self.activation: Callable[[Tensor], Tensor] = torch.tanh
        self.settings = Settings()

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.encoder(self.trunk(x))) * self.settings.ask()
        x = x + 1 if self.trainer.training else x
        return self.head(x)


@pytest.fixture
def captured() -> CapturedModel:
    module = Model()
    trainer = lp.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.training, module.trainer = True, trainer
    found = capture(module, (torch.randn(4, 3),))
    found.check_reads()
    return found


def set_training(module: Any, training: bool) -> None:
    module.trainer.training = training


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m.trunk[1].__setitem__(1, nn.ReLU()), "sub-modules.* of trunk.1 were replaced"),
        (lambda m: m.trunk.append(nn.ReLU()), "sub-modules.* of trunk were replaced"),
        (lambda m: setattr(m, "head", nn.Linear(3, 2)), "of the pipelined module were replaced"),
        (lambda m: m.encoder.register_forward_hook(lambda *_: None), "hooks.* of encoder were"),
        (
            lambda m: m.encoder.register_forward_pre_hook(lambda *_: None),
            "of encoder were replaced",
        ),
        (lambda m: setattr(m.trunk, "forward", torch.relu), "forward of trunk were replaced"),
        (lambda m: setattr(m, "activation", torch.relu), "self.activation, which is not what"),
        (lambda m: setattr(m.settings, "factor", 2.0), "self.settings.factor, which was 1.0"),
        (lambda m: m.encoder.eval(), "self.encoder.training, which was True .* and is False"),
        (lambda m: set_training(m, False), "self.trainer.training, which was True"),
    ],
)
def test_what_the_graph_would_miss_is_an_error(
    captured: CapturedModel, change: Callable[[Any], object], text: str
) -> None:
    change(captured.module)
    with pytest.raises(CaptureError, match=text):
        captured.check_reads()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.eval(),
        lambda m: m.trunk.eval(),
        lambda m: setattr(m.trunk[1][0], "p", 0.5),
        lambda m: m.head.register_forward_hook(lambda *_: None),
        lambda m: setattr(m.head, "weight", nn.Parameter(m.head.weight.detach() * 2)),
        lambda m: m.register_forward_hook(lambda *_: None),
        lambda m: m.settings.ask(),
    ],
    ids=[
        "evaluation",
        "eval of layers",
        "of a layer",
        "hook of a layer",
        "weight",
        "hook",
        "count",
    ],
)
def test_what_the_stages_or_the_call_see_may_change(
    captured: CapturedModel, change: Callable[[Any], object]
) -> None:
    change(captured.module)
    captured.check_reads()


def test_an_encoder_in_evaluation_from_the_first_on_stays_so() -> None:
    module = nn.Sequential(Encoder(), nn.Linear(3, 2))
    module[0].eval()
    captured = capture(module, (torch.randn(4, 3),))
    captured.check_reads()
    module.eval()
    captured.check_reads()
    module.train()
    with pytest.raises(CaptureError, match=r"self\.0\.training, which was False .* and is True"):
        captured.check_reads()


@pytest.mark.parametrize("name", ["p", "another"])
def test_attributes_of_leaves_stay_while_a_step_runs(captured: CapturedModel, name: str) -> None:
    module: Any = captured.module
    with captured.frozen.keeping_leaves():
        module.settings.ask()
    refused = pytest.raises(ValueError, match=r"changes an attribute of trunk\.1\.0, which")
    with refused, captured.frozen.keeping_leaves():
        setattr(module.trunk[1][0], name, 0.5)
