"""Small random backbones of the transformers library, as users build them: ``AutoModel``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from helpers.models import DataSpec
from helpers.random_models import OptimizerSpec, SupervisedModule

TOKENS = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
NO_CACHE = {"use_cache": False}
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODER = {**TOKENS, **SIZES, **NO_DROPOUT, "max_position_embeddings": 64}
NARROW = {**ENCODER, "embedding_size": 8}
EVEN = {**ENCODER, "embedding_size": 16}
DECODER = {
    **TOKENS,
    **SIZES,
    **NO_CACHE,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
GPT = {
    **TOKENS,
    **NO_CACHE,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
IMAGES = {**SIZES, **NO_DROPOUT, "image_size": 8, "patch_size": 4}
OF_A_GROUP = ("q", "k", "v", "post_attention", "intermediate", "output")

BACKBONES: dict[str, dict[str, Any]] = {
    # Encoders
    "albert": NARROW,
    "bert": ENCODER,
    "convbert": {**EVEN, "head_ratio": 1},
    "deberta-v2": ENCODER,
    "distilbert": {
        **TOKENS,
        "dim": 16,
        "n_layers": 2,
        "n_heads": 2,
        "hidden_dim": 32,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "electra": NARROW,
    "fnet": ENCODER,
    "layoutlm": {**ENCODER, "max_2d_position_embeddings": 64},
    "mobilebert": {**EVEN, "intra_bottleneck_size": 8, "true_hidden_size": 8},
    "modernbert": ENCODER,
    "mpnet": ENCODER,
    "roberta": ENCODER,
    "roformer": EVEN,
    "squeezebert": {**EVEN, **{f"{name}_groups": 1 for name in OF_A_GROUP}},
    # Decoders
    "bloom": {**TOKENS, **NO_CACHE, "hidden_size": 16, "n_layer": 2, "n_head": 2},
    "cohere": DECODER,
    "falcon": {**TOKENS, **NO_CACHE, **SIZES, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "gemma": DECODER,
    "gemma2": DECODER,
    "gpt2": GPT,
    "gpt_neo": {
        **TOKENS,
        **NO_CACHE,
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "attention_types": [[["global", "local"], 1]],
        "max_position_embeddings": 64,
        "embed_dropout": 0.0,
        "attention_dropout": 0.0,
        "resid_dropout": 0.0,
    },
    "gpt_neox": DECODER,
    "gptj": {**GPT, "rotary_dim": 4},
    "llama": DECODER,
    "mamba": {**TOKENS, **NO_CACHE, **SIZES, "state_size": 4, "time_step_rank": 2},
    "mistral": DECODER,
    "mixtral": {**DECODER, "num_local_experts": 2},
    "mpt": {**TOKENS, **NO_CACHE, "d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 64},
    "olmo2": DECODER,
    "opt": {**DECODER, "ffn_dim": 32, "word_embed_proj_dim": 16, "dropout": 0.0},
    "phi": DECODER,
    "qwen2": DECODER,
    "qwen3": DECODER,
    # An encoder and a decoder
    "bart": {
        **TOKENS,
        **NO_CACHE,
        "d_model": 16,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "dropout": 0.0,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
        "max_position_embeddings": 64,
    },
    "t5": {
        **TOKENS,
        **NO_CACHE,
        "d_model": 16,
        "d_kv": 8,
        "num_layers": 2,
        "num_heads": 2,
        "d_ff": 32,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    },
    # Images and sounds
    "beit": {**IMAGES, "drop_path_rate": 0.0},
    "clip_vision_model": IMAGES,
    "convnext": {
        "image_size": 8,
        "patch_size": 2,
        "hidden_sizes": [8, 8],
        "depths": [1, 1],
        "num_stages": 2,
    },
    "deit": IMAGES,
    "dinov2": IMAGES,
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1]},
    "siglip_vision_model": IMAGES,
    "swin": {
        "image_size": 8,
        "patch_size": 2,
        "embed_dim": 8,
        "depths": [1, 1],
        "num_heads": [1, 2],
        "window_size": 2,
        "drop_path_rate": 0.0,
    },
    "vit": IMAGES,
    "wav2vec2": {
        **SIZES,
        "conv_dim": (8, 8),
        "conv_kernel": (3, 3),
        "conv_stride": (2, 2),
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "feat_proj_dropout": 0.0,
        "layerdrop": 0.0,
        "mask_time_prob": 0.0,
    },
}
"""Name of a kind of model in transformers -> options of its configuration."""

ONLY_FLOAT32 = ("gemma", "gemma2", "mixtral")
"""Backbones that compute in float32 whatever they get, or have no operators for float64."""

OF_THE_WHOLE_BATCH = ("resnet",)
"""BatchNorm: its statistics are those of one device in one micro-batch only."""


@dataclass(frozen=True)
class BackboneData(DataSpec):
    """Samples as the keywords of a backbone.

    Attributes:
        kind: of the backbone.
    """

    kind: str = "bert"

    def loader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(self.seed)
        num, dtype = self.num_samples, getattr(torch, self.dtype)
        tokens = torch.randint(3, 50, (2, num, 7), generator=generator)
        images = torch.randn(num, 3, 8, 8, generator=generator, dtype=dtype)
        columns = {"input_ids": tokens[0]}
        if self.kind in ("t5", "bart"):
            columns["decoder_input_ids"] = tokens[1, :, :5]
        if self.kind == "wav2vec2":
            columns = {"input_values": images.flatten(1)[:, :80]}
        elif list(BACKBONES).index(self.kind) >= list(BACKBONES).index("beit"):
            columns = {"pixel_values": images}
        samples = [{name: column[i] for name, column in columns.items()} for i in range(num)]
        return DataLoader(samples, batch_size=self.batch_size)  # type: ignore[arg-type]


class Backbone(SupervisedModule):
    """A head on a backbone that is called by keywords; ``module="backbone"``."""

    def __init__(self, kind: str) -> None:
        from transformers import AutoConfig, AutoModel

        super().__init__(OptimizerSpec("sgd"))
        torch.manual_seed(2)
        self.backbone: nn.Module = AutoModel.from_config(
            AutoConfig.for_model(kind, **BACKBONES[kind])
        )

    def step_loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        hidden = self.backbone(**batch).last_hidden_state
        return (hidden.flatten(1).mean(1) + hidden.flatten(1).square().mean(1)).mean(), [hidden]
