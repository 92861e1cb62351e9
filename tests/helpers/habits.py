"""Layers whose Python does what users' does: reads numbers, looks at masks, packs, changes weights.

Each takes a value of shape ``(samples, WIDTH)``, which some read as a sequence of ``WIDTH``
entries, and the length of every sample, from 1 to ``WIDTH``; it returns a value of the same shape.
In a first batch all lengths may be alike, so that it does not show what later ones do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

WIDTH = 6
"""Features of every value inside a model."""


def mask_of(lengths: Tensor) -> Tensor:
    """Which entries of each sample count, ``(samples, WIDTH)``."""
    return torch.arange(WIDTH, device=lengths.device) < lengths[:, None]


class Habit(nn.Module):
    """A linear layer, and something beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.layer(x) + self.beside(x.tanh(), lengths)

    def beside(self, x: Tensor, lengths: Tensor) -> Tensor:
        """What is added, for bounded values."""
        raise NotImplementedError


def _plain(function: Callable[[Tensor, Tensor], Tensor]) -> type[Habit]:
    """A habit without weights of its own."""

    class Plain(Habit):
        def beside(self, x: Tensor, lengths: Tensor) -> Tensor:
            return function(x, lengths)

    Plain.__name__ = function.__name__.title().replace("_", "")
    return Plain


# --- numbers that Python reads out of the data


def trimmed(x: Tensor, lengths: Tensor) -> Tensor:
    return x[:, : int(lengths.max())].mean(1, keepdim=True).expand_as(x)


def trimmed_and_masked(x: Tensor, lengths: Tensor) -> Tensor:
    longest = int(lengths.max())
    kept = (x * mask_of(lengths))[:, :longest]
    return F.pad(kept, (0, WIDTH - longest))


def row_by_row(x: Tensor, lengths: Tensor) -> Tensor:
    rows = [row[:n].mean().expand(WIDTH) for row, n in zip(x, lengths.tolist(), strict=True)]
    return torch.stack(rows)


def read_by_numpy(x: Tensor, lengths: Tensor) -> Tensor:
    return x * float(np.asarray(lengths.cpu()).mean())


def scaled_by_spread(x: Tensor, lengths: Tensor) -> Tensor:
    return x / (1 + x.detach().std(unbiased=False).item())


def counted(x: Tensor, lengths: Tensor) -> Tensor:
    return x * torch.bincount(lengths, minlength=WIDTH + 1)[1:] / 8


def one_hot_of_data(x: Tensor, lengths: Tensor) -> Tensor:
    found = F.one_hot(lengths)
    return x / found.shape[1]


def one_hot_of_all(x: Tensor, lengths: Tensor) -> Tensor:
    return x * F.one_hot(lengths, WIDTH + 1)[:, 1:]


def different_lengths(x: Tensor, lengths: Tensor) -> Tensor:
    _, place = torch.unique(lengths, return_inverse=True)
    return x * place[:, None]


def repeated(x: Tensor, lengths: Tensor) -> Tensor:
    owner = torch.arange(len(x), device=x.device).repeat_interleave(lengths)
    rows = x.repeat_interleave(lengths, 0)
    return torch.zeros_like(x).index_add(0, owner, rows) / WIDTH


def branch_on_mean(x: Tensor, lengths: Tensor) -> Tensor:
    if x.mean() > 0:
        return x.square()
    return x.sin()


def branch_on_length(x: Tensor, lengths: Tensor) -> Tensor:
    return x.square() if bool((lengths == WIDTH).all()) else x.sin()


def checked(x: Tensor, lengths: Tensor) -> Tensor:
    if lengths.min() < 1:
        raise ValueError("a sample has no entries")
    assert not torch.isnan(x).any()
    return x.sin()


# --- masks


def mean_of_entries(x: Tensor, lengths: Tensor) -> Tensor:
    mask = mask_of(lengths)
    return (x * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True) * x


def share_of_longest(x: Tensor, lengths: Tensor) -> Tensor:
    mask = mask_of(lengths)
    return x * mask / mask.sum(1).max()


def mean_of_batch(x: Tensor, lengths: Tensor) -> Tensor:
    mask = mask_of(lengths)
    return x * ((x * mask).sum() / mask.sum())


def selected(x: Tensor, lengths: Tensor) -> Tensor:
    return x - x[mask_of(lengths)].mean()


def filled(x: Tensor, lengths: Tensor) -> Tensor:
    return x.masked_fill(~mask_of(lengths), -1e9).softmax(1)


def written_in_place(x: Tensor, lengths: Tensor) -> Tensor:
    y = x.clone()
    y[:, :2] *= 2
    y[~mask_of(lengths)] = 0.5
    return y


def first_row_written(x: Tensor, lengths: Tensor) -> Tensor:
    y = x.clone()
    y[0] += lengths[0]
    return y


def rows_scattered(x: Tensor, lengths: Tensor) -> Tensor:
    return torch.zeros_like(x).scatter(1, (lengths - 1)[:, None], x[:, :1])


# --- what keeps the dimension of the samples


def sorted_by_length(x: Tensor, lengths: Tensor) -> Tensor:
    return x[lengths.argsort(descending=True, stable=True)]


def sorted_and_back(x: Tensor, lengths: Tensor) -> Tensor:
    order = lengths.argsort(descending=True, stable=True)
    return x[order].sin()[order.argsort()]


def ranked(x: Tensor, lengths: Tensor) -> Tensor:
    return x - x.sort(0).values


def running_length(x: Tensor, lengths: Tensor) -> Tensor:
    return x * (lengths - WIDTH).cumsum(0)[:, None] / WIDTH


def neighbour(x: Tensor, lengths: Tensor) -> Tensor:
    return x.roll(1, 0) + x.flip(0)


def share_of_samples(x: Tensor, lengths: Tensor) -> Tensor:
    return x * (WIDTH - lengths).to(x.dtype).softmax(0)[:, None]


def all_pairs(x: Tensor, lengths: Tensor) -> Tensor:
    same = (lengths[:, None] == lengths[None]).to(x.dtype)
    return same @ x / len(x)


def shorter_ones(x: Tensor, lengths: Tensor) -> Tensor:
    short = (lengths < WIDTH).to(x.dtype)
    return x + (x * short[:, None]).cumsum(0)


def centred(x: Tensor, lengths: Tensor) -> Tensor:
    return x - x.mean(0)


def halves_swapped(x: Tensor, lengths: Tensor) -> Tensor:
    half = len(x) // 2
    return torch.cat([x[half:], x[:half]])


def as_pairs(x: Tensor, lengths: Tensor) -> Tensor:
    try:
        return x.view(4, 2, WIDTH).flip(1).reshape(-1, WIDTH)
    except RuntimeError:
        return x


def number_of_samples(x: Tensor, lengths: Tensor) -> Tensor:
    return x / x.shape[0]


def place_in_batch(x: Tensor, lengths: Tensor) -> Tensor:
    return x * torch.arange(len(x), device=x.device)[:, None] / 8


# --- autograd inside


def recomputed(x: Tensor, lengths: Tensor) -> Tensor:
    return checkpoint(lambda y: (y * mask_of(lengths)).sin(), x, use_reentrant=False)


def slope(x: Tensor, lengths: Tensor) -> Tensor:
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        (found,) = torch.autograd.grad((y.sin() * mask_of(lengths)).sum(), y)
    return x * found


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


def own_function(x: Tensor, lengths: Tensor) -> Tensor:
    return _Doubled.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class _OfLengthOne(_Doubled):
    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0] / (1e-3 + gradients[0].norm())


normed = _OfLengthOne.apply  # under a name of its own, as reversed gradients often are


def normed_gradient(x: Tensor, lengths: Tensor) -> Tensor:
    return normed(x)  # type: ignore[no-any-return]


PLAIN = {
    function.__name__: _plain(function)
    for function in (
        *(trimmed, trimmed_and_masked, row_by_row, read_by_numpy, scaled_by_spread, counted),
        *(one_hot_of_data, one_hot_of_all, different_lengths, repeated, branch_on_mean),
        *(branch_on_length, checked, mean_of_entries, share_of_longest, mean_of_batch, selected),
        *(filled, written_in_place, first_row_written, rows_scattered, sorted_by_length),
        *(sorted_and_back, ranked, running_length, neighbour, share_of_samples, all_pairs),
        *(shorter_ones, centred, halves_swapped, as_pairs, number_of_samples),
        *(place_in_batch, recomputed, slope, own_function, normed_gradient),
    )
}


# --- layers with weights or state


class Packed(Habit):
    """The last state of a recurrent layer over packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(1, WIDTH, batch_first=True)

    def packed(self, x: Tensor, lengths: Tensor) -> tuple[Any, Tensor]:
        """Outputs and last states."""
        given = pack_padded_sequence(
            x.unsqueeze(-1), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        outputs, last = self.cell(given)
        return outputs, last[0]

    def beside(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.packed(x, lengths)[1]


class PackedAndPadded(Packed):
    """Outputs padded to the longest sequence, of which the mean depends on it."""

    def beside(self, x: Tensor, lengths: Tensor) -> Tensor:
        padded, _ = pad_packed_sequence(self.packed(x, lengths)[0], batch_first=True)
        return padded.mean(1)


class PaddedToWidth(Packed):
    """Outputs padded to a given length."""

    def beside(self, x: Tensor, lengths: Tensor) -> Tensor:
        outputs, _ = self.packed(x, lengths)
        padded, _ = pad_packed_sequence(outputs, batch_first=True, total_length=WIDTH)
        return padded.mean(1)


class PaddingMask(Habit):
    """An encoder of transformers, which leaves padding out in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(2, 2, 4, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)

    def beside(self, x: Tensor, lengths: Tensor) -> Tensor:
        pairs = torch.stack([x, x.cos()], -1)
        encoded = self.encoder(pairs, src_key_padding_mask=~mask_of(lengths))
        return encoded.sum(1).repeat(1, WIDTH // 2)


class MaxNorm(Habit):
    """An embedding that shortens its own vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH + 1, WIDTH, max_norm=0.5)

    def beside(self, x: Tensor, lengths: Tensor) -> Tensor:
        return x * self.table(lengths)


class Clamped(Habit):
    """A parameter that its forward keeps in bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.randn(WIDTH))

    def beside(self, x: Tensor, lengths: Tensor) -> Tensor:
        with torch.no_grad():
            self.factor.clamp_(-0.5, 0.5)
        return x * self.factor


class Renormed(Clamped):
    """Likewise, by its data."""

    def beside(self, x: Tensor, lengths: Tensor) -> Tensor:
        self.factor.data = self.factor.data / self.factor.data.norm()
        return x * self.factor


class SpectralNorm(Habit):
    """A parametrization with a power iteration in training."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def beside(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.normed(x)  # type: ignore[no-any-return]


class CountsCalls(Habit):
    """A buffer that counts calls in training and changes the result."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def beside(self, x: Tensor, lengths: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return x / (1 + self.calls)


class RunningMean(Habit):
    """A buffer with a moving average of the samples, which evaluation reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def beside(self, x: Tensor, lengths: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return x
        return x - self.mean


class Remembers(Habit):
    """A plain attribute with what it saw last."""

    longest = 0
    last: Any = None

    def beside(self, x: Tensor, lengths: Tensor) -> Tensor:
        self.last = x.detach()
        return x.sin()


class RemembersMean(Habit):
    """A plain attribute with a moving average, which the next call computes with."""

    mean: Any = None

    def beside(self, x: Tensor, lengths: Tensor) -> Tensor:
        now = x.detach().mean(0)
        self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        return x - self.mean


class KeywordNames(Habit):
    """Parameters with names that are words of Python, or no names of it."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("class", "lambda", "None", "2", "x y"):
            self.register_parameter(name, nn.Parameter(torch.rand(WIDTH)))
        self.add_module("import", nn.Linear(WIDTH, WIDTH))
        self.tables = nn.ParameterDict({"is": torch.rand(WIDTH), "a-b": torch.rand(WIDTH)})

    def beside(self, x: Tensor, lengths: Tensor) -> Tensor:
        y = self.get_submodule("import")(x)
        for name in ("class", "lambda", "None", "2", "x y"):
            y = y * getattr(self, name)
        return y + self.tables["is"] * self.tables["a-b"]


class NamesOfCalls(Habit):
    """Parts named like what a graph's code uses itself."""

    def __init__(self) -> None:
        super().__init__()
        self.input = nn.Linear(WIDTH, WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.self = nn.Parameter(torch.rand(WIDTH))
        self.torch = nn.Parameter(torch.rand(WIDTH))
        self.root = nn.ModuleDict({"graph": nn.Tanh(), "add": nn.Linear(WIDTH, WIDTH)})

    def beside(self, x: Tensor, lengths: Tensor) -> Tensor:
        y = self.output(self.input(x) * self.self + self.torch)
        return self.root["graph"](self.root["add"](y))  # type: ignore[no-any-return]


class Gate(nn.Module):
    """Takes a mask or None, and returns a state or None."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, state: Any = None, scale: float = 1.0
    ) -> tuple[Tensor, Any]:
        y = self.inner(x) * scale
        if mask is not None:
            y = y * mask
        if state is not None:
            y = y + state[0]
        return y, (None if mask is None else (y, None))


class Forces(Habit):
    """An energy, and its gradient at the inputs, which is taken in evaluation, too."""

    def beside(self, x: Tensor, lengths: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            energy = self.layer(y).tanh().sum(1, keepdim=True)
            (forces,) = torch.autograd.grad(energy.sum(), y, create_graph=self.training)
        return energy * forces


class NoneOrValue(Habit):
    """One gate that is called in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def beside(self, x: Tensor, lengths: Tensor) -> Tensor:
        first, state = self.gate(x)
        second, state = self.gate(first, mask_of(lengths), state=state, scale=0.5)
        return first + self.gate(second.tanh(), state=state)[0]


def logged(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that hands everything on."""

    @functools.wraps(forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    return call


def with_default(name: str, value: Any) -> Callable[..., Callable[..., Any]]:
    """A decorator that fills in an argument, as transformers does from a configuration."""

    def decorator(forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get(name) is None:
                kwargs[name] = value
            return forward(self, *args, **kwargs)

        return call

    return decorator


class DecoratedGate(Gate):
    """Its forward goes through decorators."""

    @logged
    @with_default("scale", 0.5)
    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        return super().forward(*args, **kwargs)


class Decorated(NoneOrValue):
    """The same, decorated."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = DecoratedGate()


class WithoutGradient(Habit):
    """A part that is decorated to have no gradient."""

    @torch.no_grad()
    def target(self, x: Tensor) -> Tensor:
        """What the layer itself gives."""
        return self.layer(x)  # type: ignore[no-any-return]

    def beside(self, x: Tensor, lengths: Tensor) -> Tensor:
        return x * self.target(x)


class HookedGradient(Habit):
    """A hook makes the gradients of a layer's inputs small."""

    def __init__(self) -> None:
        super().__init__()
        self.layer.register_full_backward_hook(
            lambda _, gradients, __: (gradients[0] / (1e-3 + gradients[0].norm()),)
        )

    def beside(self, x: Tensor, lengths: Tensor) -> Tensor:
        return x.sin()


HABITS: dict[str, type[Habit]] = PLAIN | {
    kind.__name__: kind
    for kind in (
        *(Packed, PackedAndPadded, PaddedToWidth, PaddingMask, MaxNorm, Clamped, Renormed),
        *(SpectralNorm, CountsCalls, RunningMean, Remembers, RemembersMean, KeywordNames),
        *(NamesOfCalls, NoneOrValue, Decorated, WithoutGradient, Forces, HookedGradient),
    )
}
"""All of them by name."""
