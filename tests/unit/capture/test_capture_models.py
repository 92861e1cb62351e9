"""Every kind of model: all partitions of its operators compute what the module computes."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from pipelined import assert_partitions_exact
from torch import Tensor, nn

from lightning_gpp.capture import Block, BlockGraph, capture

pytestmark = pytest.mark.filterwarnings("error")


def data(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*shape, requires_grad=grad)


class TwoTowers(nn.Module):
    """A shared tensor feeds two towers; a skip goes around the second one.

            ┌─ a ─────────┐
    x ─ stem┤             ├─ head
            └─ b ─ c ─(+)─┘
                └──────┘
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(6, 5)
        self.c, self.head = nn.Linear(5, 5), nn.Linear(10, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.stem(x))
        a, b = self.a(h), self.b(h)
        return self.head(torch.cat([a, b + self.c(b).relu()], dim=1))


def test_two_towers_with_a_shared_tensor_and_a_skip() -> None:
    captured = assert_partitions_exact(TwoTowers(), data(4, 4, grad=True))
    assert captured.method == "torch.fx"
    assert [operator.name for operator in captured.graph] == [
        *("stem", "tanh", "a", "b", "c", "relu", "add", "cat", "head")
    ]
    assert captured.graph.predecessors["cat"] == ("a", "add")
    assert captured.graph.operator["c"].parameters == ("c.weight", "c.bias")
    assert captured.graph.inputs[0].requires_grad
    assert captured.graph.values["cat"].tensors[0].shape == (4, 10)
    assert captured.graph.values["cat"].tensors[0].batch_dim == 0


class ManyInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(2, 4), nn.Linear(5, 4)

    def forward(
        self, x: Tensor, *, batch: dict[str, Tensor], rest: list[Tensor], mask: Tensor | None = None
    ) -> Tensor:
        total = self.a(x) + self.b(batch["image"]) * batch["scale"]
        for item in rest:
            total = total + self.c(item)
        return total if mask is None else total * mask


def test_positional_keyword_dict_and_list_inputs() -> None:
    batch = {"image": data(4, 2), "scale": data(4, 1, grad=True)}
    rest = [data(4, 5), data(4, 5)]
    captured = assert_partitions_exact(ManyInputs(), data(4, 3), batch=batch, rest=rest)
    names = [item.value.name for item in captured.graph.inputs]
    assert names == ["x", "batch_image", "batch_scale", "rest_0", "rest_1"]


@dataclass
class Both:
    logits: Tensor
    extra: Any = None


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class ModelOutput(collections.OrderedDict[str, Any]):
    """As transformers has them: a dict with attributes, unknown to pytree."""


class Outputs(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.a, self.b = kind, nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        y = self.b(h)
        return {
            "dict": lambda: {"y": y, "nested": (h, [y.sum(1)], None, "text", 3)},
            "tuple": lambda: (y, h, y),
            "dataclass": lambda: Both(y, {"h": h}),
            "namedtuple": lambda: Pair(h, y),
            "model_output": lambda: ModelOutput(logits=y, hidden=(h, y)),
            "input": lambda: (y, x),
            "parameter": lambda: (y, self.a.weight),
            "size": lambda: (y, x.shape[0]),
        }[self.kind]()


@pytest.mark.parametrize(
    "kind",
    ["dict", "tuple", "dataclass", "namedtuple", "model_output", "input", "parameter", "size"],
)
def test_nested_outputs(kind: str) -> None:
    assert_partitions_exact(Outputs(kind), data(4, 3), num_partitions=3)


class DataclassInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 2)

    def forward(self, batch: Both) -> Tensor:
        return self.a(batch.logits) * batch.extra["scale"]


def test_dataclass_input_without_registration() -> None:
    captured = assert_partitions_exact(
        DataclassInput(), Both(data(4, 3), {"scale": data(4, 1)}), num_partitions=3
    )
    names = [item.value.name for item in captured.graph.inputs]
    assert names == ["batch_logits", "batch_extra_scale"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mid, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mid(self.embed(x)))


def test_tied_weights_are_one_parameter() -> None:
    captured = assert_partitions_exact(Tied(), torch.randint(0, 7, (4, 3)))
    assert captured.graph.operator["embed"].parameters == ("embed.weight",)
    assert captured.graph.operator["head"].parameters == ("embed.weight", "head.bias")
    stage = captured.stage(["head"], ["mid"], ["head"])
    assert set(stage.parameter_names) == {"embed.weight", "head.bias"}


class Twice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.mid = inner, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.mid(self.inner(x)))


def test_module_called_twice() -> None:
    captured = assert_partitions_exact(Twice(nn.Linear(4, 4)), data(4, 4))
    assert [operator.name for operator in captured.graph] == ["inner", "mid", "inner_1"]
    assert captured.graph.operator["inner_1"].target == "inner"


def test_batch_norm_called_twice_stays_on_one_stage() -> None:
    captured = assert_partitions_exact(Twice(nn.BatchNorm1d(4)), data(6, 4))
    (operator,) = captured.graph.operators
    assert set(operator.state) == {
        f"inner.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    }


def test_batch_norm_state_and_untouched_buffers() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    captured = assert_partitions_exact(module, data(6, 3))
    assert "1.running_mean" in captured.graph.operators[1].state
    assert captured.stage(
        [captured.graph.operators[1].name],
        captured.graph.operators[1].inputs,
        [captured.graph.operators[1].outputs[0].name],
    ).buffer_names == ("1.num_batches_tracked", "1.running_mean", "1.running_var")


class Dropouts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.a(x))
        return F.dropout(self.b(h), 0.3, self.training) + F.dropout(h, 0.5, self.training).sum()


@pytest.mark.parametrize("method", ["torch.fx", "concrete"])
def test_dropout_of_both_kinds(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _only(method, monkeypatch)
    captured = assert_partitions_exact(Dropouts(), data(4, 4), in_order=True)
    assert captured.method == method


class Sizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x.view(x.size(0), -1, 6))
        b, n, _ = h.shape
        h = h.reshape(b * n // 2, -1)
        positions = torch.arange(h.shape[1], device=x.device)
        h = self.b(h + positions).view(x.shape[0], -1)
        return h.new_zeros(x.size()[0], 1) + h.unsqueeze(1).expand(-1, x.shape[0] * 2, -1).sum(1)


@pytest.mark.parametrize("method", ["torch.fx", "concrete"])
def test_sizes_are_computed_anew(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _only(method, monkeypatch)
    captured = assert_partitions_exact(Sizes(), data(4, 12))
    assert captured.method == method
    _assert_same_on(captured, data(6, 12))


class Dlrm(nn.Module):
    """One embedding per table, interactions, as in DLRM: list inputs and a Python loop."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Linear(3, 4)
        self.tables = nn.ModuleList(nn.EmbeddingBag(5, 4, mode="sum") for _ in range(3))
        self.top = nn.Linear(4 + 6, 1)

    def forward(self, dense: Tensor, offsets: Tensor, indices: Tensor) -> Tensor:
        x = self.bottom(dense)
        columns = [x, *(t(i, o) for t, i, o in zip(self.tables, indices, offsets, strict=True))]
        stacked = torch.cat(columns, dim=1).view(len(x), len(columns), -1)
        product = torch.bmm(stacked, stacked.transpose(1, 2))
        rows, cols = torch.tril_indices(product.shape[1], product.shape[1], offset=-1)
        return self.top(torch.cat([x, product[:, rows, cols]], dim=1))


def test_dlrm_with_iterated_tensors_needs_the_concrete_tracer() -> None:
    offsets = torch.arange(4).repeat(3, 1)
    captured = assert_partitions_exact(Dlrm(), data(4, 3), offsets, torch.randint(0, 5, (3, 4)))
    assert captured.method == "concrete"
    assert captured.graph.operator["tables_2"].parameters == ("tables.2.weight",)


class Flags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x: Tensor, twice: bool, mask: Tensor | None = None, p: float = 1.0) -> Tensor:
        h = self.a(x) * p
        h = self.a(h) if twice else h
        return h if mask is None else h * mask


def test_arguments_that_are_no_tensors_are_frozen_and_checked() -> None:
    captured = assert_partitions_exact(Flags(), data(4, 3), True)
    x = data(4, 3)
    assert captured.inputs((x,), {"twice": True, "mask": None}) == {"x": x}
    with pytest.raises(ValueError, match=r"argument 'twice' was True .* got False"):
        captured.inputs((x, False), {})
    with pytest.raises(ValueError, match=r"'mask' was None .* got a tensor"):
        captured.inputs((x, True, x), {})
    with pytest.raises(ValueError, match=r"'x' was torch.float32 .* got torch.float64"):
        captured.inputs((x.double(), True), {})


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTM(3, 4), nn.LSTM(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, state = self.first(x)
        h, (last, _) = self.second(h, state)
        return self.head(h), last


@pytest.mark.parametrize("method", ["torch.fx", "concrete"])
def test_lstm_with_a_tuple_as_state(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _only(method, monkeypatch)
    captured = assert_partitions_exact(Lstm(), data(5, 4, 3))
    assert [operator.name for operator in captured.graph] == ["first", "second", "head"]


class DirectParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.a = nn.Parameter(torch.randn(4)), nn.Linear(4, 4)
        self.constant = torch.randn(4)
        self.register_buffer("shift", torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.scale + self.constant + self.shift
        return self.a(h) * self.scale


@pytest.mark.parametrize("method", ["torch.fx", "concrete"])
def test_parameter_buffer_and_constant_used_directly(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _only(method, monkeypatch)
    module = DirectParameter()
    captured = assert_partitions_exact(module, data(4, 4))
    readers = [o.name for o in captured.graph if "scale" in o.parameters]
    assert len(readers) == 2
    assert not hasattr(module, "_tensor_constant0")


class InPlace(nn.Module):
    def __init__(self, by_item: bool) -> None:
        super().__init__()
        self.by_item = by_item
        self.a, self.relu, self.b = nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.a(x))
        h = self.b(h)
        before = h.sum(1, keepdim=True)
        h.add_(1)
        if self.by_item:
            h[:, 0] = 0
        return h * before


@pytest.mark.parametrize("by_item", [False, True])
def test_in_place_changes_under_any_partition(by_item: bool) -> None:
    captured = assert_partitions_exact(InPlace(by_item), data(4, 4), num_partitions=10)
    assert captured.method == ("concrete" if by_item else "torch.fx")
    # relu is with a; sum, add_ and the assignment are with b
    assert [operator.name for operator in captured.graph] == ["a", "b", "mul"]


class ChangesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = x * 2
        x += 1
        return h + self.b(x)


def test_in_place_change_of_an_input() -> None:
    module, x = ChangesInput(), data(4, 4)
    kept = x.clone()
    captured = capture(module, (x,), {})
    assert torch.equal(x, kept)
    expected = module(x.clone())
    (got,) = captured.stage([o.name for o in captured.graph], ["x"], captured.graph.outputs)(
        [x], training=True
    )
    assert torch.equal(got, expected)
    assert torch.equal(x, kept)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = Straight.apply(self.a(x))
        with torch.no_grad():
            target = self.b(h).softmax(1)
        return (self.b(h) * target).sum(1)


def test_custom_autograd_function_and_no_grad_regions() -> None:
    captured = assert_partitions_exact(Custom(), data(4, 4))
    assert captured.method == "concrete"


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant, self.a, self.b = reentrant, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(
            lambda h: self.b(self.a(h).relu()), x, use_reentrant=self.reentrant
        )


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_parts_are_looked_into(reentrant: bool) -> None:
    captured = assert_partitions_exact(Checkpointed(reentrant), data(4, 4, grad=True))
    assert len(captured.graph) == 3


class Drop(nn.Module):
    """Stochastic depth: nothing at all in eval mode."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * x.new_empty(x.shape[0], 1).bernoulli_(0.5) / 0.5


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.drop_a, self.drop_b = Drop(), Drop()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_a(self.a(x))
        return x + self.drop_b(self.b(x))


def test_a_module_that_branches_on_the_mode_becomes_a_leaf() -> None:
    captured = assert_partitions_exact(Residual(), data(4, 4), in_order=True)
    assert [o.name for o in captured.graph] == ["a", "drop_a", "add", "b", "drop_b", "add_1"]


class Encoders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_layers_of_a_transformer_encoder_are_operators() -> None:
    captured = assert_partitions_exact(Encoders(), data(4, 3, 8))
    assert {"encoder_layers_0", "encoder_layers_1"} <= {o.name for o in captured.graph}


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(2, 4)})
        self.fusion = nn.Bilinear(4, 4, 2)

    def forward(self, x_a: Tensor, x_b: Tensor) -> Tensor:
        if x_a.sum().item() == 12345.0:
            raise RuntimeError
        return self.fusion(self.encoders["a"](x_a), self.encoders["b"](x_b))


def test_blocks_given_by_the_user() -> None:
    blocks = BlockGraph(
        blocks=(
            Block(name="a", module="encoders.a", inputs=("x_a",)),
            Block(name="b", module="encoders.b", inputs=("x_b",)),
            Block("fuse", "fusion", ("a", "b")),
        ),
        outputs=("fuse",),
    )
    captured = assert_partitions_exact(
        Untraceable(), data(4, 3), data(4, 2), options={"blocks": blocks}
    )
    assert [operator.name for operator in captured.graph] == ["a", "b", "fuse"]
    assert captured.method == "blocks"


def _only(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Switches the other tracer off."""
    from lightning_gpp.capture import attempts

    def refuse(*_: Any) -> Any:
        raise RuntimeError("switched off for this test")

    other = "trace_concretely" if method == "torch.fx" else "trace_symbolically"
    monkeypatch.setattr(attempts, other, refuse)


def _assert_same_on(captured: Any, x: Tensor) -> None:
    module = captured.module
    stage = captured.stage([o.name for o in captured.graph], ["x"], captured.graph.outputs)
    values = dict(zip(captured.graph.outputs, stage([x], training=module.training), strict=True))
    assert torch.allclose(captured.output(values), module(x))


class MovingAverage(nn.Module):
    """Replaces its buffer in every training forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.average = 0.9 * self.average + 0.1 * h.detach().mean(0)
        return h - self.average


def test_replaced_buffers_are_replaced_by_stages() -> None:
    captured = assert_partitions_exact(MovingAverage(), data(4, 4))
    states = [operator.state for operator in captured.graph if operator.state]
    assert states == [("average",)]


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = self.a(x) @ self.b.weight
        return self.b(h.float())


@pytest.mark.parametrize("method", ["torch.fx", "concrete"])
def test_autocast_inside_of_forward(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _only(method, monkeypatch)
    captured = assert_partitions_exact(Autocast(), data(4, 4))
    assert captured.graph.values["a"].tensors[0].dtype == "bfloat16"


class Gpt(nn.Module):
    """Attention written by hand, sizes everywhere, tied embeddings, an optional loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(9, 4), nn.Embedding(8, 4)
        self.qkv, self.head = nn.Linear(4, 12), nn.Linear(4, 9, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)))

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        batch, time = ids.size()
        assert time <= 8, f"too long: {time}"
        x = self.tokens(ids) + self.places(torch.arange(time, device=ids.device))
        batch, time, width = x.size()
        q, k, v = (
            part.view(batch, time, 2, width // 2).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        scores = q @ k.transpose(-2, -1) * (1.0 / k.size(-1) ** 0.5)
        scores = scores.masked_fill(self.mask[:time, :time] == 0, float("-inf"))
        x = x + (F.softmax(scores, -1) @ v).transpose(1, 2).contiguous().view(batch, time, width)
        logits = self.head(x)
        if targets is None:
            return logits[:, [-1], :], None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


@pytest.mark.parametrize("with_loss", [False, True])
def test_a_language_model_with_sizes_everywhere(with_loss: bool) -> None:
    ids = torch.randint(0, 9, (4, 6))
    targets = torch.randint(0, 9, (4, 6)) if with_loss else None
    captured = assert_partitions_exact(Gpt(), ids, targets)
    assert all(operator.inputs for operator in captured.graph)
    if not with_loss:
        _assert_same_on_ids(captured, torch.randint(0, 9, (3, 5)))


def _assert_same_on_ids(captured: Any, ids: Tensor) -> None:
    module = captured.module
    stage = captured.stage([o.name for o in captured.graph], ["ids"], captured.graph.outputs)
    values = dict(zip(captured.graph.outputs, stage([ids], training=module.training), strict=True))
    assert torch.allclose(captured.output(values)[0], module(ids)[0])


class PaddedSequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
        h, _ = self.lstm(packed)
        return nn.utils.rnn.pad_packed_sequence(h, batch_first=True)[0].sum(1)


def test_packed_sequences() -> None:
    assert_partitions_exact(PaddedSequences(), data(4, 5, 3), torch.tensor([5, 3, 2, 1]))


def test_message_passing_layers_are_leaves() -> None:
    pyg = pytest.importorskip("torch_geometric.nn")

    class Gnn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = pyg.GCNConv(3, 4), pyg.GCN2Conv(4, 0.1, 0.5, 2)

        def forward(self, x: Tensor, edges: Tensor, weights: Tensor | None = None) -> Tensor:
            h = F.dropout(self.a(x, edges, weights).relu(), 0.5, self.training)
            return self.b(h, h, edges)

    captured = assert_partitions_exact(
        Gnn(), data(6, 3), torch.randint(0, 6, (2, 12)), in_order=True
    )
    assert [operator.name for operator in captured.graph] == ["a", "relu", "dropout", "b"]
