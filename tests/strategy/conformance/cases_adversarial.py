"""Manual optimization with two optimizers whose losses alternate.

In a GAN the forward or a sub-module by name is pipelined, while the rest stays in the user's step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conformance.case import odd
from conformance.cases_manual import ManualModule, resume
from conformance.modules import NUM_TARGETS, WIDTH, StepsModule


class AdversarialModule(StepsModule):
    """A GAN: the forward is the generator; the discriminator sees real, fake, and detached fake.

    Args:
        toggles: how one network is kept from gradients while the other trains: ``"methods"``,
            ``"context"`` or ``"nothing"``.
        optimizer: of both networks.
    """

    def __init__(self, toggles: str, optimizer: type = torch.optim.SGD) -> None:
        super().__init__()
        torch.manual_seed(27)
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(WIDTH, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, NUM_TARGETS)
        )
        self.discriminator = nn.Sequential(
            nn.Linear(NUM_TARGETS, 8), nn.LeakyReLU(0.2), nn.Linear(8, 8), nn.Tanh(),
            nn.Linear(8, 1),
        )  # fmt: skip
        self.toggles, self.optimizer = toggles, optimizer

    def forward(self, x: Tensor) -> Tensor:
        return self.generator(x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), y) + self.discriminator(y).mean()

    def judged(self, y: Tensor, wanted: float) -> Tensor:
        """How far the discriminator's judgement is from the wanted one."""
        found = self.discriminator(y)
        return F.binary_cross_entropy_with_logits(found, torch.full_like(found, wanted))

    def generator_loss(self, batch: Any) -> Tensor:
        return self.judged(self(batch[0]), 1.0)

    def discriminator_loss(self, batch: Any) -> Tensor:
        return (self.judged(batch[1], 1.0) + self.judged(self(batch[0]).detach(), 0.0)) / 2

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizers: Any = self.optimizers()
        losses = (("generator", self.generator_loss), ("discriminator", self.discriminator_loss))
        for optimizer, (name, loss_of) in zip(optimizers, losses, strict=True):
            self.update(name, optimizer, lambda: loss_of(batch))  # noqa: B023

    def update(self, name: str, optimizer: Any, loss_of: Callable[[], Tensor]) -> None:
        """A step of one network."""
        if self.toggles == "context":
            with optimizer.toggle_model():
                self.descend(name, optimizer, loss_of())
            return
        if self.toggles == "methods":
            self.toggle_optimizer(optimizer)
        self.descend(name, optimizer, loss_of())
        if self.toggles == "methods":
            self.untoggle_optimizer(optimizer)

    def descend(self, name: str, optimizer: Any, loss: Tensor) -> None:
        """Backward and step; gradients of the other network wait for its step, unless toggled."""
        self.manual_backward(loss)
        if name == "generator":
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad()
        self.log(name, loss, on_step=True, on_epoch=True)

    def configure_optimizers(self) -> Any:
        networks = (self.generator, self.discriminator)
        return [self.optimizer(network.parameters(), lr=0.02) for network in networks]


class OneFakeModule(AdversarialModule):
    """One fake for both losses: the generator's graph is used after the discriminator's step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        for_generator, for_discriminator = self.optimizers()  # type: ignore[misc]
        fake = self(x)
        loss = (self.judged(y, 1.0) + self.judged(fake.detach(), 0.0)) / 2
        self.descend("discriminator", for_discriminator, loss)
        self.descend("generator", for_generator, self.judged(fake, 1.0))


class UnevenTurnsModule(AdversarialModule):
    """The discriminator trains in every batch, the generator in every second."""

    def update(self, name: str, optimizer: Any, loss_of: Callable[[], Tensor]) -> None:
        if name == "discriminator" or self.trainer.fit_loop.batch_idx % 2:
            super().update(name, optimizer, loss_of)


class SharedModule(ManualModule):
    """Two optimizers for two parts of one forward, with a loss each."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        towers, top = self.optimizers()  # type: ignore[misc]
        for name, optimizer, wanted in (("top", top, y), ("towers", towers, y.tanh())):
            self.toggle_optimizer(optimizer)
            loss = F.mse_loss(self(x), wanted)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.log(name, loss)

    def configure_optimizers(self) -> Any:
        towers = [*self.left.parameters(), *self.right.parameters()]
        top = [*self.fuse.parameters(), *self.norm.parameters(), *self.head.parameters()]
        return torch.optim.SGD(towers, 0.05, momentum=0.9), torch.optim.AdamW(top, 0.01)


CASES = [
    *(
        odd(
            f"GAN, {network or 'forward'} pipelined, toggled by {toggles}",
            lambda toggles=toggles: AdversarialModule(toggles),
            strategy={"module": network},
        )
        for network in (None, "generator", "discriminator")
        for toggles in ("methods", "context", "nothing")
    ),
    odd("GAN with Adam", lambda: AdversarialModule("methods", torch.optim.Adam)),
    *(
        odd(
            f"GAN with one fake, {network or 'forward'} pipelined",
            lambda: OneFakeModule("nothing"),
            strategy={"module": network},
        )
        for network in (None, "discriminator")
    ),
    odd(
        "GAN in uneven turns",
        lambda: UnevenTurnsModule("methods"),
        strategy={"module": "discriminator"},
    ),
    odd("two optimizers for one forward", SharedModule),
    odd(
        "resumed GAN",
        lambda: AdversarialModule("methods", torch.optim.AdamW),
        script=resume,
        strategy={"module": "discriminator"},
    ),
]
