"""Torch's transformer modules with masks: programs compute in evaluation what they do there."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest
import torch
from helpers.random_programs import random_program
from helpers.spmd_ranks import on_threads
from helpers.spmd_training import stored_parts
from helpers.threads.collectives import ThreadCollectives
from torch import Tensor, nn

from lightning_gpp.spmd.run.export import export_forward
from lightning_gpp.spmd.run.interpreter import Interpreter

CAUSAL = nn.Transformer.generate_square_subsequent_mask(5)


def encoder_layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)


class Calls(nn.Module):
    """A module of torch, called as is said."""

    def __init__(self, module: nn.Module, call: Callable[..., object]) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, x: Tensor, padding: Tensor) -> object:
        return self.call(self.module, x, padding)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "encoder": lambda: Calls(
        nn.TransformerEncoder(encoder_layer(), 2, nn.LayerNorm(8)),
        lambda encoder, x, p: encoder(x, src_key_padding_mask=p),
    ),
    "numbers": lambda: Calls(
        nn.TransformerEncoder(encoder_layer(), 2),
        lambda encoder, x, p: encoder(x, None, torch.zeros(p.shape).to(x).masked_fill(p, -1e9)),
    ),
    "not nested": lambda: Calls(
        nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False),
        lambda encoder, x, p: encoder(x, src_key_padding_mask=p),
    ),
    "causal": lambda: Calls(
        nn.TransformerEncoder(encoder_layer(), 2), lambda encoder, x, p: encoder(x, CAUSAL.to(x))
    ),
    "layer": lambda: Calls(encoder_layer(), lambda layer, x, p: layer(x, src_key_padding_mask=p)),
    "decoder": lambda: Calls(
        nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 12, 0.0, batch_first=True), 2),
        lambda decoder, x, p: decoder(x, x * 2, CAUSAL.to(x), memory_key_padding_mask=p),
    ),
    "both": lambda: Calls(
        nn.Transformer(8, 2, 1, 1, 12, 0.0, batch_first=True),
        lambda both, x, p: both(x, x * 2, src_key_padding_mask=p, memory_key_padding_mask=p),
    ),
    "attention": lambda: Calls(
        nn.MultiheadAttention(8, 2, batch_first=True),
        lambda attention, x, p: attention(x, x, x, p, average_attn_weights=False),
    ),
}

CASES = [(name, [5, 3, 2, 4]) for name in MODULES]
CASES += [("encoder", [5, 0, 2, 4]), ("encoder", [-5, 3, 2, 4])]
"""Lengths of samples; of one, padding is in the midst."""


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("name", "lengths"), CASES)
def test_evaluation(name: str, lengths: list[int]) -> None:
    torch.manual_seed(1)
    module = MODULES[name]().double().eval()
    x = torch.randn(4, 5, 8, dtype=torch.float64)
    is_padding = torch.arange(5) >= torch.tensor(lengths).abs()[:, None]
    is_padding[0, 1] = lengths[0] < 0
    with torch.no_grad():
        exported = export_forward(module, (x, is_padding))
        program = random_program(exported.graph, (0.5, 0.5), random.Random(name), stay=0.2)

        def run(group: ThreadCollectives) -> Mapping[str, Tensor]:
            stored = stored_parts(module, exported, program, group.rank)
            given = exported.form.inputs((x, is_padding), {}) if group.rank == 0 else None
            with torch.no_grad():
                return Interpreter(exported.graph, program, group).run(stored, given).results

        results = on_threads(2, run)[0]
        found = exported.form.result([results[name] for name in exported.graph.outputs])
        torch.testing.assert_close(found, module(x, is_padding))
