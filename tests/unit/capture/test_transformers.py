"""Models of transformers, random weights: what of them is captured in a way of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.transformer_models import IMAGES, SIZES, TOKENS, gpt2, t5
from torch import nn

from lightning_gpp.capture import capture

pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.mark.parametrize(
    ("build", "tied"), [(gpt2, "transformer.wte.weight"), (t5, "shared.weight")]
)
def test_tied_embeddings_stay_one_parameter(build: Callable[[], nn.Module], tied: str) -> None:
    tokens = torch.randint(3, TOKENS, (4, 7))
    captured = capture(build(), (), {"input_ids": tokens, "labels": tokens})
    readers = [operator.name for operator in captured.graph if tied in operator.parameters]
    assert len(readers) >= 2
    assert "lm_head.weight" not in captured.graph.parameter


def test_a_cache_is_withheld(caplog: pytest.LogCaptureFixture) -> None:
    inputs = {"input_ids": torch.randint(3, TOKENS, (4, 7)), "use_cache": True}
    captured = capture(gpt2(), (), inputs)
    assert " (DynamicCache)" in caplog.text
    output = captured.output(dict.fromkeys(captured.graph.outputs))
    assert not any("Cache" in type(value).__name__ for value in output.values())


def wav2vec2() -> nn.Module:
    from transformers.models.wav2vec2.modeling_wav2vec2 import (
        Wav2Vec2Config,
        Wav2Vec2ForSequenceClassification,
    )

    convolutions = {"conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 8)}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    config = Wav2Vec2Config(
        **SIZES,
        intermediate_size=32,
        **convolutions,
        **positions,
        num_feat_extract_layers=2,
        mask_time_length=2,
    )
    return Wav2Vec2ForSequenceClassification(config)


def vilt() -> nn.Module:
    from transformers.models.vilt.modeling_vilt import ViltConfig, ViltModel

    return ViltModel(ViltConfig(**IMAGES, vocab_size=TOKENS, max_position_embeddings=16))


def test_masks_drawn_by_numpy_keep_the_model_whole() -> None:
    captured = capture(wav2vec2(), (), {"input_values": torch.randn(4, 200)})
    assert "Wav2Vec2Model" in " ".join(captured.kept_whole)
    assert len(captured.graph.operators) > 1


def test_patches_selected_by_the_data_keep_their_module_whole() -> None:
    inputs = {"input_ids": torch.ones(4, 6).long(), "pixel_values": torch.randn(4, 3, 8, 8)}
    captured = capture(vilt(), (), inputs)
    assert "ViltEmbeddings" in " ".join(captured.kept_whole)
    assert len(captured.graph.operators) > 4
