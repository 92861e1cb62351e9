"""Steps that call the forward as often as they like, on what they like, with or without gradient.

Every call is an ordinary differentiable function of its arguments: it may be repeated, chained,
looked at, and left out of the loss.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conformance.case import calls, odd
from conformance.modules import NUM_TARGETS, WIDTH, CaseModule, StepsModule

ACCUMULATED = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}

# Several calls -----------------------------------------------------------------------------------


class SiameseModule(CaseModule):
    """Both members of a pair go through the same forward, one call each."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        wanted = (y - y.roll(1, 0)).square().sum(1)
        distance = (self(x) - self(x.roll(1, 0))).square().sum(1)
        return 0.1 * F.smooth_l1_loss(distance, wanted)


class ConsistencyModule(CaseModule):
    """Outputs of a noisy view follow those of the clean one, which has no gradient.

    Args:
        clean: how the gradient of the clean view is left out.
        noisy_first: whether the call with gradient comes first.
    """

    def __init__(self, clean: Callable[[], Any] = torch.no_grad, *, noisy_first: bool) -> None:
        super().__init__()
        self.clean, self.noisy_first = clean, noisy_first

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        generator = torch.Generator().manual_seed(int(1e6 * x[0, 0].abs()))
        noisy = x + 0.3 * torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x)
        output = self(noisy) if self.noisy_first else None
        with self.clean():
            wanted = self(x)
        output = self(noisy) if output is None else output
        return F.mse_loss(output, wanted.clone()) + F.mse_loss(output, y)


class PenaltyModule(CaseModule):
    """The loss uses weights of the pipelined forward itself, too."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.1 * self.head.weight.square().sum()


ON_TWO = [{"modules": ["left", "right", "fuse", "norm", "head"], "devices": [0, 1]}]
"""A plan with everything on both devices."""


def nothing() -> torch.enable_grad:
    """Both views have gradients."""
    return torch.enable_grad()


class SizesModule(CaseModule):
    """Calls on 2n, n, n - 2 and a single sample; positional and by keyword."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        both = self(torch.cat([x, -x]))
        rest = self(x=x[2:])
        one = self(x[:1] * 2)
        return F.mse_loss(self(x), y) + both.std() + 0.1 * (rest - y[2:]).abs().sum() + one.mean()


class UnusedModule(CaseModule):
    """A call before and one after the loss's, which nothing but a log looks at."""

    def loss(self, batch: Any) -> Tensor:
        x, _ = batch
        before = self(-x)
        loss = super().loss(batch)
        self.log("before", before.mean())
        self.log("after", self(x[:3]).detach().mean())
        return loss


class ChainedModule(CaseModule):
    """The output of one call is, through a layer of its own, the argument of the next.

    Args:
        detached: whether the second call's argument has no history, or also goes into the loss.
    """

    def __init__(self, *, detached: bool) -> None:
        super().__init__()
        self.adapt = nn.Linear(NUM_TARGETS, WIDTH)
        self.detached = detached

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        first = self(x)
        second = self(self.adapt(first.detach() if self.detached else first))
        third = self(second.detach().repeat(1, 2)[:, :WIDTH]) if self.detached else 0.0
        return F.mse_loss(second + 0.1 * third, y) + 0.5 * F.mse_loss(first, y)


class ViewsModule(CaseModule):
    """Parts of one call's output in several terms, some of them without gradient."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        output = self(torch.cat([x, x.flip(1)]))
        first, second = output.chunk(2)
        one, *_ = second.unbind(1)
        return F.mse_loss(first, y) + F.mse_loss(first.detach(), second) + one.logsumexp(0)


# Teacher and student -----------------------------------------------------------------------------


class TeacherModule(StepsModule):
    """A student learns from targets and from a frozen copy of itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(24)
        layers = [nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8)]
        self.student = nn.Sequential(*layers, nn.Linear(8, NUM_TARGETS))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        with torch.no_grad():
            wanted = self.teacher(x)
        output = self.student(x)
        return F.mse_loss(output, y) + F.mse_loss(output, wanted)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.student.parameters(), lr=0.05, momentum=0.9)


class TeacherBesideModule(TeacherModule):
    """The student is called as ``self(x)``, on two views; the teacher sees both at once."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        wanted, mirrored = self.teacher(torch.cat([x, -x])).chunk(2)
        term = F.mse_loss(self(-x), mirrored)
        return term + F.mse_loss(self(x), (y + wanted) / 2)


# Gradients that leave the forward ----------------------------------------------------------------


class FrontModule(CaseModule):
    """A trainable embedding in front of the forward, another layer behind it.

    Args:
        freezes: whether the forward's own layers do not train.
    """

    def __init__(self, *, freezes: bool = False) -> None:
        super().__init__()
        if freezes:
            self.requires_grad_(False)
        self.table = nn.Embedding(7, WIDTH)
        self.behind = nn.Linear(NUM_TARGETS, NUM_TARGETS)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        numbers = (x.abs() * 4).long() % 7
        return F.mse_loss(self.behind(self(self.table(numbers).mean(1) + x)), y)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.behind(self(batch[0]))


class SaliencyModule(CaseModule):
    """Logs how the output changes with the input; that leaves no gradient at any parameter.

    Args:
        same_call: whether the loss is taken of the call that was looked at.
        in_validation: whether validation looks at it, too.
    """

    def __init__(self, *, same_call: bool, in_validation: bool = False) -> None:
        super().__init__()
        self.same_call, self.in_validation = same_call, in_validation

    def loss(self, batch: Any) -> Tensor:
        if not self.training and not self.in_validation:
            return super().loss(batch)
        x, y = batch
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            output = self(x)
            (slope,) = torch.autograd.grad(output.square().sum(), x, retain_graph=self.same_call)
        assert x.grad is None
        name = "train" if self.training else "val"
        self.log(f"{name}_slope", slope.abs().mean())
        self.log(f"{name}_largest", slope.abs().sum(1).max())
        return F.mse_loss(output if self.same_call else self(x.detach()), y)


# State from batch to batch -----------------------------------------------------------------------


class CarryingModule(StepsModule):
    """Truncated backpropagation through time: a detached state goes on to the next batch."""

    hidden: Any = None

    def start(self, x: Tensor) -> Any:
        """The state before the first step."""
        return x.new_zeros(len(x), 8)

    def run(self, x: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        """Outputs and the state after them."""
        return self(x, hidden)

    def detached(self, hidden: Any) -> Any:
        return hidden.detach()

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        goes_on = self.training and self.hidden is not None and len(x) == 8
        output, hidden = self.run(x, self.hidden if goes_on else self.start(x))
        if self.training:
            self.hidden = self.detached(hidden)
        return F.mse_loss(output, y)

    def on_train_epoch_start(self) -> None:
        self.hidden = None


class RecurrentModule(CarryingModule):
    """A recurrent network by hand.

    Args:
        num_steps: calls of the forward per batch; the gradient flows through all.
    """

    def __init__(self, num_steps: int = 1) -> None:
        super().__init__()
        torch.manual_seed(25)
        self.read, self.keep = nn.Linear(WIDTH, 8), nn.Linear(8, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, NUM_TARGETS)
        self.num_steps = num_steps

    def forward(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = (self.read(x) + self.keep(hidden)).tanh()
        return self.head(self.norm(hidden)), hidden

    def run(self, x: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        outputs = []
        for step in range(self.num_steps):
            output, hidden = self(x.roll(step, 1), hidden)
            outputs.append(output)
        return torch.stack(outputs).mean(0), hidden


class LongMemoryModule(CarryingModule):
    """An LSTM between two layers; its state, a tuple, has the samples in its second dimension."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(26)
        self.read = nn.Sequential(nn.Linear(1, 6), nn.Tanh())
        self.memory = nn.LSTM(6, 8, batch_first=True)
        self.head = nn.Linear(8, NUM_TARGETS)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> Any:
        outputs, state = self.memory(self.read(x.unsqueeze(2)), state)
        return self.head(outputs[:, -1]), state

    def start(self, x: Tensor) -> Any:
        return x.new_zeros(1, len(x), 8), x.new_zeros(1, len(x), 8)

    def detached(self, hidden: Any) -> Any:
        return tuple(part.detach() for part in hidden)


CASES = [
    odd("penalty on weights with replicas", PenaltyModule, strategy={"plan": ON_TWO}),
    odd(
        "penalty on weights with replicas, accumulated and clipped",
        PenaltyModule,
        strategy={"plan": ON_TWO},
        trainer=ACCUMULATED,
    ),
    odd("siamese", SiameseModule),
    odd("siamese, accumulated and clipped", SiameseModule, trainer=ACCUMULATED),
    odd("a clean view without gradient", lambda: ConsistencyModule(noisy_first=False)),
    odd("a clean view in between", lambda: ConsistencyModule(noisy_first=True)),
    odd(
        "a clean view in inference mode",
        lambda: ConsistencyModule(torch.inference_mode, noisy_first=True),
    ),
    odd(
        "both views with gradient, accumulated and clipped",
        lambda: ConsistencyModule(nothing, noisy_first=True),
        trainer=ACCUMULATED,
    ),
    odd("calls on several numbers of samples", SizesModule, script=calls("fit", "test")),
    odd("a call that the loss does not use", UnusedModule),
    odd("chained calls", lambda: ChainedModule(detached=False)),
    odd("chained calls, accumulated", lambda: ChainedModule(detached=False), trainer=ACCUMULATED),
    odd("calls on detached outputs", lambda: ChainedModule(detached=True)),
    odd("several terms of one call", ViewsModule),
    odd("teacher, and a student by name", TeacherModule, strategy={"module": "student"}),
    odd("teacher beside two calls of the student", TeacherBesideModule),
    odd("embedding in front", FrontModule, script=calls("fit", "predict")),
    odd("embedding in front, no sanity check", FrontModule, trainer={"num_sanity_val_steps": 0}),
    odd("embedding in front, validated before", FrontModule, script=calls("validate", "fit")),
    odd("embedding in front of frozen layers", lambda: FrontModule(freezes=True)),
    odd("saliency by a call of its own", lambda: SaliencyModule(same_call=False)),
    odd(
        "saliency of the call of the loss",
        lambda: SaliencyModule(same_call=True),
        trainer=ACCUMULATED,
    ),
    odd(
        "saliency in validation",
        lambda: SaliencyModule(same_call=True, in_validation=True),
        trainer={"inference_mode": False},
    ),
    odd("state from batch to batch", RecurrentModule),
    odd("state through several calls", lambda: RecurrentModule(3)),
    odd(
        "state through several calls, accumulated", lambda: RecurrentModule(3), trainer=ACCUMULATED
    ),
    odd("state of an LSTM", LongMemoryModule),
]
