"""Small random backbones of the transformers library, as users build them: ``AutoModel``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from helpers.models import DataSpec
from helpers.random_models import OptimizerSpec, SupervisedModule

NONE = (
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "hidden_dropout", "dropout"),
    *("attention_dropout", "activation_dropout", "embed_dropout", "resid_dropout", "dropout_rate"),
    *("resid_pdrop", "embd_pdrop", "attn_pdrop", "drop_path_rate", "feat_proj_dropout"),
    *("layerdrop", "mask_time_prob"),
)
COMMON = {
    **dict.fromkeys(NONE, 0.0),
    "vocab_size": 50,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "use_cache": False,
    "max_position_embeddings": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "image_size": 8,
}
"""What most kinds know of; the others do not look at it."""
NOT_OF = {"falcon": ("head_dim",), "swin": ("head_dim", "num_attention_heads", "num_hidden_layers")}

OWN: dict[str, dict[str, Any]] = {
    # Encoders
    "albert": {"embedding_size": 8},
    "bert": {},
    "convbert": {"embedding_size": 16, "head_ratio": 1},
    "deberta-v2": {},
    "distilbert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
    "electra": {"embedding_size": 8},
    "fnet": {},
    "layoutlm": {"max_2d_position_embeddings": 64},
    "mobilebert": {"embedding_size": 16, "intra_bottleneck_size": 8, "true_hidden_size": 8},
    "modernbert": {},
    "mpnet": {},
    "roberta": {},
    "roformer": {"embedding_size": 16},
    "squeezebert": {
        "embedding_size": 16,
        **dict.fromkeys(("q_groups", "k_groups", "v_groups", "post_attention_groups"), 1),
        "intermediate_groups": 1,
        "output_groups": 1,
    },
    # Decoders
    "bloom": {"n_layer": 2, "n_head": 2},
    "cohere": {},
    "falcon": {},
    "gemma": {},
    "gemma2": {},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "gpt_neo": {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]},
    "gpt_neox": {},
    "gptj": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "rotary_dim": 4},
    "llama": {},
    "mamba": {"state_size": 4, "time_step_rank": 2},
    "mistral": {},
    "mixtral": {"num_local_experts": 2},
    "mpt": {"d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 64},
    "olmo2": {},
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 16},
    "phi": {},
    "qwen2": {},
    "qwen3": {},
    # An encoder and a decoder
    "bart": {
        "d_model": 16,
        **{
            f"{part}_{what}": 2
            for part in ("encoder", "decoder")
            for what in ("layers", "attention_heads")
        },
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
    },
    "t5": {"d_model": 16, "d_kv": 8, "num_layers": 2, "num_heads": 2, "d_ff": 32},
    # Images and sounds
    "beit": {"patch_size": 4},
    "clip_vision_model": {"patch_size": 4},
    "convnext": {"patch_size": 2, "hidden_sizes": [8, 8], "depths": [1, 1], "num_stages": 2},
    "deit": {"patch_size": 4},
    "dinov2": {"patch_size": 4},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1]},
    "siglip_vision_model": {"patch_size": 4},
    "swin": {
        "patch_size": 2,
        "embed_dim": 8,
        "depths": [1, 1],
        "num_heads": [1, 2],
        "window_size": 2,
    },
    "vit": {"patch_size": 4},
    "wav2vec2": {
        "conv_dim": (8, 8),
        "conv_kernel": (3, 3),
        "conv_stride": (2, 2),
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
    },
}
BACKBONES: dict[str, dict[str, Any]] = {
    kind: {name: value for name, value in COMMON.items() if name not in NOT_OF.get(kind, ())} | own
    for kind, own in OWN.items()
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
