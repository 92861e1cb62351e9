"""Where samples meet in a forward, also where the given samples do not show it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from lightning_gpp.capture import CapturedModel, capture
from lightning_gpp.capture.other_sizes import unlike_tried

Body = Callable[["Sub", Tensor, Tensor], Tensor]


class Sub(nn.Module):
    """A body over embedded tokens; of the padding there is none in the batch that is captured."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.embedding, self.linear = nn.Embedding(9, 6), nn.Linear(6, 6)
        self.gru = nn.GRU(6, 6, batch_first=True)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("weights", torch.ones(6))

    def forward(self, ids: Tensor) -> Tensor:
        return self.body(self, ids, self.embedding(ids))


class Model(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.sub, self.head = Sub(body), nn.Linear(6, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.sub(ids))


def why_not(body: Body, *, averages: bool = False, training: bool = True) -> str | None:
    model = Model(body).train(training)
    ids = torch.randint(1, 9, (4, 5), generator=torch.Generator().manual_seed(0))
    captured = capture(model, (ids,))
    averaged = frozenset(captured.graph.outputs) if averages else None
    return captured.where_samples_meet(averaged)


def packed(sub: Sub, ids: Tensor, tokens: Tensor, total_length: int | None = None) -> Tensor:
    lengths = (ids != 0).sum(1).cpu()
    output, _ = sub.gru(pack_padded_sequence(tokens, lengths, True, enforce_sorted=False))
    padded: Tensor = pad_packed_sequence(output, True, total_length=total_length)[0]
    return padded.mean(1)


def loop(sub: Sub, ids: Tensor, tokens: Tensor) -> Tensor:
    lengths = (ids != 0).sum(1).tolist()
    return torch.stack([row[:n].mean(0) for row, n in zip(tokens, lengths)])


def spread_mean(sub: Sub, ids: Tensor, tokens: Tensor) -> Tensor:
    out = torch.zeros_like(tokens[:, 0])
    out[:, 0] = (ids != 0).sum(1).max()
    return sub.linear(tokens.mean(1)) + out


def caught(sub: Sub, ids: Tensor, tokens: Tensor) -> Tensor:
    rows = sub.linear(tokens.mean(1))
    try:
        return rows.view(4, 2, 6).flip(1).reshape(-1, 6)
    except RuntimeError:  # with another number of samples
        return rows


MEET: dict[str, Body] = {
    "caught": caught,
    "int": lambda s, ids, x: s.linear(x[:, : int((ids != 0).sum(1).max())].mean(1)),
    "item": lambda s, ids, x: s.linear(x[:, : (ids != 0).sum(1).max().item()].mean(1)),
    "slice": lambda s, ids, x: s.linear(x[:, : (ids != 0).sum(1).max()].mean(1)),
    "float": lambda s, ids, x: s.linear(x.mean(1)) / float((ids != 0).sum(1).max()),
    "numpy": lambda s, ids, x: s.linear(x[:, : (ids != 0).sum(1).numpy().max()].mean(1)),
    "tolist": loop,
    "branch": lambda s, ids, x: s.linear(x.mean(1)) * (1.0 if (ids != 0).all() else 2.0),
    "longest": lambda s, ids, x: s.linear(x.mean(1)) / (ids != 0).sum(1).max(),
    "all": lambda s, ids, x: s.linear(x.mean(1)) * (2.0 - (ids != 0).all().float()),
    "zero so far": lambda s, ids, x: s.linear(x.mean(1)) + x.detach()[ids == 0].square().sum(),
    "masked mean": lambda s, ids, x: s.linear(x.mean(1)) - s.linear(x[ids != 0].mean(0)),
    "masked count": lambda s, ids, x: s.linear(x.mean(1)) / x[ids != 0].shape[0],
    "counts": lambda s, ids, x: s.linear(x.mean(1)) * torch.bincount((ids != 0).sum(1)).shape[0],
    "unique": lambda s, ids, x: s.linear(x.mean(1)) * torch.unique(ids).shape[0],
    "classes": lambda s, ids, x: (
        s.linear(x.mean(1)) * nn.functional.one_hot((ids == 0).sum(1)).shape[1]
    ),
    "first sample": lambda s, ids, x: s.linear(x.mean(1)) * (ids != 0)[0].sum(),
    "filled": lambda s, ids, x: (
        s.linear(x.mean(1)) + x.new_full((len(x), 6), (ids != 0).sum(1).max())
    ),
    "shuffled": lambda s, ids, x: s.linear(x.mean(1) + x.mean(1)[torch.randperm(len(x))]),
    "in place": spread_mean,
    "same group": lambda s, ids, x: s.linear(
        (ids[:, None, 0] == ids[None, :, 0]).float() @ x.mean(1)
    ),
    "from the one before": lambda s, ids, x: s.linear(
        torch.where((ids == 0)[..., None], x.roll(1, 0), x).mean(1)
    ),
    "rolled by keywords": lambda s, ids, x: s.linear(x.roll(dims=0, shifts=1).mean(1)),
    "rolled as a whole": lambda s, ids, x: s.linear(x.roll(1).mean(1)),
    "upside down": lambda s, ids, x: s.linear(x.flipud().mean(1)),
    "normalized": lambda s, ids, x: s.linear(nn.functional.normalize(x, dim=0).mean(1)),
    "frequencies": lambda s, ids, x: s.linear(torch.fft.fft(x, dim=0).real.mean(1)),
    "differences": lambda s, ids, x: s.linear(x.diff(1, 0, prepend=x[:1]).mean(1)),
    "halves": lambda s, ids, x: s.linear(torch.stack(x.mean(1).chunk(2), 1).flatten(0, 1)),
    "interleaved": lambda s, ids, x: s.linear(
        x.mean(1).unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
    ),
    "odd ones first": lambda s, ids, x: s.linear(torch.cat([x[1::2], x[::2]]).mean(1)),
    "pairs": lambda s, ids, x: s.linear(x.view(-1, 2, 5, 6).flip(1).view(x.shape).mean(1)),
    "so far": lambda s, ids, x: s.linear(x.mean(1)) * (ids == 0).cumsum(dim=0)[:, :1],
    "packed": packed,
}
APART: dict[str, Body] = {
    "layers": lambda s, ids, x: s.linear(x).relu().mean(1),
    "recurrent": lambda s, ids, x: s.gru(x)[1][0],
    "attention": lambda s, ids, x: s.attention(x, x, x, key_padding_mask=ids == 0)[0].mean(1),
    "batch norm": lambda s, ids, x: s.norm(x.mean(1)),
    "masked mean of each": lambda s, ids, x: s.linear(
        (x * (ids != 0)[..., None]).sum(1) / (ids != 0).sum(1, keepdim=True)
    ),
    "rows": lambda s, ids, x: (
        torch.zeros_like(x).masked_scatter((ids > 3)[..., None], s.linear(x[ids > 3])).sum(1)
    ),
    "packed": lambda s, ids, x: packed(s, ids, x, total_length=ids.shape[1]),
    "put back": lambda s, ids, x: put_back(s, ids, x),
    "flat": lambda s, ids, x: s.linear(x.flatten(0, 1)).view(*ids.shape, 6).mean(1),
    "positions": lambda s, ids, x: (x + torch.arange(ids.shape[1])[:, None].type_as(x)).mean(1),
    "shuffled tokens": lambda s, ids, x: s.linear(x[:, torch.randperm(x.shape[1])].mean(1)),
    "tokens so far": lambda s, ids, x: s.linear(x.cumsum(1).roll(2, 1).softmax(-1).mean(1)),
    "normalized tokens": lambda s, ids, x: s.linear(nn.functional.normalize(x).mean(1)),
    "shifted windows": lambda s, ids, x: s.linear(x.roll((0, -3), (1, 2)).mean(1)),
    "two views": lambda s, ids, x: sum(
        s.linear(torch.cat([x, x.flip(1)]).flip(-1).mean(1)).chunk(2), torch.zeros(())
    ),
    "sorted and back": lambda s, ids, x: sorted_and_back(s, ids, x),
    "last token": lambda s, ids, x: s.linear(x[torch.arange(len(x)), (ids != 0).sum(1) - 1]),
    "new": lambda s, ids, x: s.linear(x.mean(1)) + x.new_ones(6),
    "up to a size": lambda s, ids, x: s.linear(x[:, : ids.size(1)].mean(1)),
    "classes given": lambda s, ids, x: s.linear(
        nn.functional.one_hot((ids == 0).sum(1), 6).float()
    ),
    "number of a weight": lambda s, ids, x: s.linear(x.mean(1)) * s.weights.sum().item(),
}


def of_model(body: Callable[[Tensor], Tensor], num_samples: int = 4) -> CapturedModel:
    """The body is in the forward that is captured, not in a sub-module."""

    class Body(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return body(x.tanh())

    return capture(Body(), (torch.randn(num_samples, 3),))


@pytest.mark.parametrize(
    ("body", "is_unlike"),
    [
        (lambda x: x.flip(1) if len(x) > 8 else x, True),
        (lambda x: x * (1 + x.shape[0] // 16), True),
        (lambda x: x * (x.size(0) + 2), False),  # a trial shows it
        (lambda x: x.view(x.shape[0], -1)[torch.arange(len(x)), 1], False),
        (lambda x: x if len(x) > 1 else -x, False),
        (lambda x: x.expand(x.shape[0], -1).reshape(x.shape[0] * 3).view(-1, 3), False),
    ],
)
def test_sizes_may_tell_of_a_batch_what_they_do_not_of_a_few_samples(
    body: Callable[[Tensor], Tensor], is_unlike: bool
) -> None:
    captured = of_model(body)
    found = unlike_tried(captured, (2, 8), (4, 5, 16))
    assert (found is not None) is is_unlike
    assert found is None or "test_meeting.py:" in found
    assert unlike_tried(captured, (2, 6), (4, 5, 7)) is None


def test_of_a_forward_that_takes_one_size_only_nothing_is_known() -> None:
    captured = of_model(lambda x: torch.stack([*x.unbind(0)[::2], *x.unbind(0)[1::2]]))
    assert captured.where_samples_meet(None) == "its forward was captured with 4 samples only"


def sorted_and_back(sub: Sub, ids: Tensor, tokens: Tensor) -> Tensor:
    order = (ids != 0).sum(1).argsort()
    back: Tensor = sub.linear(tokens[order].mean(1))[order.argsort()]
    return back


def put_back(sub: Sub, ids: Tensor, tokens: Tensor) -> Tensor:
    out = torch.zeros_like(tokens)
    out[ids > 3] = sub.linear(tokens[ids > 3])
    return out.mean(1)


@pytest.mark.parametrize("body", MEET.values(), ids=MEET.keys())
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_samples_meet_although_these_do_not_show_it(body: Body, training: bool) -> None:
    found = why_not(body, training=training)
    assert found is not None
    assert "test_meeting.py:" in found


@pytest.mark.parametrize("body", APART.values(), ids=APART.keys())
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_samples_that_do_not_meet(body: Body, training: bool) -> None:
    assert why_not(body, training=training) is None


def test_an_output_of_all_samples_is_one_that_may_be_averaged() -> None:
    def body(sub: Sub, ids: Tensor, tokens: Tensor) -> Tensor:
        return sub.linear(tokens).mean((0, 1))

    assert why_not(body, averages=True) is None
    assert "brings samples together (mean)" in str(why_not(body))


def test_a_stage_with_all_samples_may_bring_them_together() -> None:
    model = Model(lambda s, ids, x: s.linear(x.mean(1)) - s.linear(x.mean(1)).mean(0))
    captured = capture(model, (torch.randint(1, 9, (4, 5)),))
    outputs = [item.outputs[0].name for item in captured.graph]
    where = captured.where_samples_meet(None)
    assert where is not None and "mean" in where
    assert captured.where_samples_meet(None, [op.name for op in captured.graph]) is None
    head = [op.name for op in captured.graph if op.outputs[0].name == outputs[-1]]
    assert captured.where_samples_meet(None, head) == where
