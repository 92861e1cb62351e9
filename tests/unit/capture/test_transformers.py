"""Models of transformers, random weights: exact at other sizes, with and without padding."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpp.capture import capture
from lightning_gpp.capture.checks.check import Result, compare
from lightning_gpp.capture.values.arguments import Withheld

pytest.importorskip("transformers", reason="transformers is not installed")

NUM_TOKENS, WIDTH = 50, 16
LAYERS: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
IMAGE: dict[str, Any] = {**LAYERS, "image_size": 8, "patch_size": 4}
TEXT: dict[str, Any] = {
    **LAYERS,
    "vocab_size": NUM_TOKENS,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def bert() -> nn.Module:
    from transformers.models.bert.modeling_bert import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(**TEXT))


def gpt2() -> nn.Module:
    from transformers.models.gpt2.modeling_gpt2 import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": NUM_TOKENS, "n_embd": WIDTH, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, n_positions=32, bos_token_id=1, eos_token_id=2))


def llama() -> nn.Module:
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**TEXT, num_key_value_heads=1))


def t5() -> nn.Module:
    from transformers.models.t5.modeling_t5 import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": NUM_TOKENS, "d_model": WIDTH, "d_kv": 8, "num_layers": 2, "d_ff": 32}
    return T5ForConditionalGeneration(T5Config(**sizes, num_heads=2, decoder_start_token_id=0))


def vit() -> nn.Module:
    from transformers.models.vit.modeling_vit import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**IMAGE, num_labels=3))


def clip() -> nn.Module:
    from transformers.models.clip.modeling_clip import CLIPConfig, CLIPModel

    return CLIPModel(CLIPConfig(text_config=TEXT, vision_config=IMAGE, projection_dim=8))


FAMILIES = {"bert": bert, "gpt2": gpt2, "llama": llama, "t5": t5, "vit": vit, "clip": clip}
CACHED = ("gpt2", "llama", "t5")


def batch_of(
    family: str, num_samples: int, length: int, *, labels: bool, padding: bool | None
) -> dict[str, Any]:
    """Arguments of the forward; ``padding`` None gives no mask, False one without zeros."""
    tokens = torch.randint(3, NUM_TOKENS, (num_samples, length))
    batch: dict[str, Any] = {}
    if family in ("vit", "clip"):
        batch["pixel_values"] = torch.randn(num_samples, 3, 8, 8)
    if family != "vit":
        batch["input_ids"] = tokens
        if padding is not None:
            kept = length - torch.arange(num_samples) % 3 * int(padding)
            batch["attention_mask"] = (torch.arange(length) < kept[:, None]).long()
    if family == "t5":
        batch["labels" if labels else "decoder_input_ids"] = tokens[:, :5].contiguous()
    elif family == "clip":
        batch["return_loss"] = labels
    elif labels:
        batch["labels"] = tokens if family in CACHED else torch.arange(num_samples) % 2
    return batch


def result_of(module: nn.Module, forward: Any) -> Result:
    """Output and gradients, with the same random numbers for dropout each time."""
    torch.manual_seed(1)
    output = forward()
    values = {name: item for name, item in output.items() if isinstance(item, Tensor)}
    sum(item.double().sin().sum() for item in values.values()).backward()
    gradients = {name: item.grad for name, item in module.named_parameters()}
    module.zero_grad()
    return Result({name: item.detach() for name, item in values.items()}, gradients)


def assert_exact(module: nn.Module, captured: Any, batch: dict[str, Any]) -> None:
    """Compares the captured graph, run as one stage, with the module in both modes."""
    graph = captured.graph
    names = [item.value.name for item in graph.inputs]
    stage = captured.stage([operator.name for operator in graph], names, graph.outputs)

    def replayed(training: bool) -> Any:
        inputs = captured.inputs((), batch)
        values = stage([inputs[name] for name in names], training=training)
        return captured.output(dict(zip(graph.outputs, values, strict=True)), training=training)

    for training in (True, False):
        module.train(training)
        expected = result_of(module, lambda: module(**batch))
        got = result_of(module, lambda training=training: replayed(training))
        compare(expected, got, f"training={training}")


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_exact_at_other_sizes_and_paddings(family: str, labels: bool) -> None:
    """Captured on a batch without padding: transformers leave the mask away there."""
    module = FAMILIES[family]().double()
    captured = capture(module, (), batch_of(family, 4, 7, labels=labels, padding=False))
    for num_samples, length, padding in ((4, 7, False), (3, 7, True), (5, 9, True)):
        batch = batch_of(family, num_samples, length, labels=labels, padding=padding)
        assert_exact(module, captured, batch)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "vit"])
def test_exact_without_a_mask(family: str) -> None:
    module = FAMILIES[family]().double()
    captured = capture(module, (), batch_of(family, 4, 7, labels=True, padding=None))
    assert_exact(module, captured, batch_of(family, 3, 8, labels=True, padding=None))


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_tied_embeddings_stay_one_parameter(family: str) -> None:
    module = FAMILIES[family]()
    captured = capture(module, (), batch_of(family, 4, 7, labels=True, padding=True))
    tied = "transformer.wte.weight" if family == "gpt2" else "shared.weight"
    readers = [operator.name for operator in captured.graph if tied in operator.parameters]
    assert len(readers) >= 2
    assert "lm_head.weight" not in captured.graph.parameter


def test_a_cache_is_withheld_and_says_so_when_read(caplog: pytest.LogCaptureFixture) -> None:
    module = gpt2()
    captured = capture(module, (), batch_of("gpt2", 4, 7, labels=False, padding=None))
    # transformers 5.24 calls it "cache", those before "past_key_values"
    output = captured.output(dict.fromkeys(captured.graph.outputs))
    ((name, cache),) = [item for item in output.items() if isinstance(item[1], Withheld)]
    assert f"{name} (DynamicCache)" in caplog.text
    for use in (lambda: cache.layers, lambda: cache[0], lambda: len(cache), lambda: bool(cache)):
        with pytest.raises(RuntimeError, match="use_cache=False"):
            use()
    assert copy.deepcopy(cache) == cache == pickle.loads(pickle.dumps(cache))
    assert cache != Withheld("DynamicCache", "other")


def wav2vec2() -> nn.Module:
    from transformers.models.wav2vec2.modeling_wav2vec2 import (
        Wav2Vec2Config,
        Wav2Vec2ForSequenceClassification,
    )

    convolutions = {"conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 8)}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    config = Wav2Vec2Config(
        **LAYERS, **convolutions, **positions, num_feat_extract_layers=2, mask_time_length=2
    )
    return Wav2Vec2ForSequenceClassification(config)


def vilt() -> nn.Module:
    from transformers.models.vilt.modeling_vilt import ViltConfig, ViltModel

    return ViltModel(ViltConfig(**IMAGE, vocab_size=NUM_TOKENS, max_position_embeddings=16))


def test_masks_drawn_by_numpy_keep_the_model_whole() -> None:
    captured = capture(wav2vec2(), (), {"input_values": torch.randn(4, 200)})
    assert "Wav2Vec2Model" in " ".join(captured.kept_whole)
    assert len(captured.graph.operators) > 1


def test_patches_selected_by_the_data_keep_their_module_whole() -> None:
    inputs = {"input_ids": torch.ones(4, 6).long(), "pixel_values": torch.randn(4, 3, 8, 8)}
    captured = capture(vilt(), (), inputs)
    assert "ViltEmbeddings" in " ".join(captured.kept_whole)
    assert len(captured.graph.operators) > 4
