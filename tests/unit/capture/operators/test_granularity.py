"""Large models: repeated blocks become a few operators each, and branches stay apart."""

from __future__ import annotations

import pytest
import torch
from pipelined import assert_partitions_exact, data
from torch import Tensor, nn

from lightning_gpp.capture import CapturedModel, capture
from lightning_gpp.capture.operators import granularity

WIDTH = 4


class Transformer(nn.Module):
    """A language model of transformers with labels and mask, as a training step calls it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, attention_mask=mask, labels=tokens).loss
        return loss


def captured_transformer(kind: str, num_layers: int) -> CapturedModel:
    """The capture of a tiny model of that kind."""
    transformers = pytest.importorskip("transformers")
    size = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    if kind == "GPT2LMHeadModel":
        config = transformers.GPT2Config(
            n_layer=num_layers, n_embd=16, n_head=2, use_cache=False, **size
        )
    else:
        config = {"BertForMaskedLM": "BertConfig", "LlamaForCausalLM": "LlamaConfig"}[kind]
        config = getattr(transformers, config)(
            num_hidden_layers=num_layers,
            hidden_size=16,
            num_attention_heads=2,
            intermediate_size=32,
            **size,
        )
    config.use_cache = False
    config.loss_type = "ForMaskedLM" if kind == "BertForMaskedLM" else "ForCausalLM"
    tokens = torch.randint(3, 32, (2, 8))
    mask = torch.ones_like(tokens)
    mask[0, 6:] = 0
    return capture(Transformer(getattr(transformers, kind)(config)), (tokens, mask))


def pieces(captured: CapturedModel, prefix: str) -> list[str]:
    """What the operators inside a module are, relative to it."""
    targets = [operator.target for operator in captured.graph]
    return [target.removeprefix(prefix) for target in targets if target.startswith(prefix)]


def test_48_layers_are_a_few_hundred_operators() -> None:
    captured = captured_transformer("GPT2LMHeadModel", 48)

    assert len(captured.graph) < 48 * 4 + 60
    for layer in range(48):
        found = pieces(captured, f"model.transformer.h.{layer}.")
        assert found == ["ln_1", "attn", "ln_2", "mlp"]
    assert "model_transformer_h_3_attn" in captured.graph.operator


@pytest.mark.parametrize(
    ("kind", "layers", "expected"),
    [
        ("BertForMaskedLM", "bert.encoder.layer", ["attention", "intermediate", "output"]),
        (
            "LlamaForCausalLM",
            "model.layers",
            ["input_layernorm", "self_attn", "post_attention_layernorm", "mlp"],
        ),
    ],
)
def test_layers_of_transformers_are_a_few_operators(
    kind: str, layers: str, expected: list[str]
) -> None:
    captured = captured_transformer(kind, 6)

    for layer in range(6):
        assert pieces(captured, f"model.{layers}.{layer}.") == expected


class Mixer(nn.Module):
    """Many small calls, one module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)) * x.sigmoid()).mul(0.5).sin().cos()


class Layer(nn.Module):
    """A residual block that calls its mixer so many times."""

    def __init__(self, num_calls: int = 1) -> None:
        super().__init__()
        self.num_calls = num_calls
        self.norm, self.mixer = nn.LayerNorm(WIDTH), Mixer()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.num_calls):
            x = x + self.mixer(self.norm(x))
        return x


class Towers(nn.Module):
    """
    x -> left.0 -> ... -> left.n  -> cat
    y -> right.0 -> ... -> right.n -/
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.left = nn.Sequential(*(Layer() for _ in range(num_layers)))
        self.right = nn.Sequential(*(Layer() for _ in range(num_layers)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([self.left(x), self.right(y)], dim=1)


def ancestors(captured: CapturedModel, name: str) -> set[str]:
    """The operators that an operator waits for."""
    found, stack = set(), [name]
    while stack:
        fresh = set(captured.graph.predecessors[stack.pop()]) - found
        found |= fresh
        stack += fresh
    return found


@pytest.mark.parametrize(
    ("many", "per_layer"), [(17, ["norm", "mixer"]), (16, [""])], ids=["large", "very large"]
)
def test_towers_stay_parallel(
    many: int, per_layer: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(granularity, "MANY", many)
    num_layers = 4
    captured = capture(Towers(num_layers), (data(4, WIDTH), data(4, WIDTH)))

    for side, other in (("left", "right"), ("right", "left")):
        prefix = f"{side}.{num_layers - 1}"
        assert pieces(captured, prefix) == [f".{name}" if name else "" for name in per_layer]
        last = [op.name for op in captured.graph if op.target.startswith(prefix)][-1]
        waits_for = ancestors(captured, last)
        assert len(waits_for) == num_layers * len(per_layer) - 1
        assert not [name for name in waits_for if name.startswith(other)]


def test_joined_operators_compute_the_same_in_any_partition() -> None:
    assert_partitions_exact(Towers(4), data(4, WIDTH), data(4, WIDTH), num_partitions=2)
