"""Tiny models of the transformers library, one per family, and the samples they train on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from helpers.models import DataSpec
from helpers.random_models import OptimizerSpec, SupervisedModule
from helpers.transformer_backbones import BACKBONES

LENGTH, TOKENS, CLASSES = 7, 50, 3
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
IMAGES = {**SIZES, "intermediate_size": 32, "image_size": 8, "patch_size": 4}


@dataclass(frozen=True)
class TransformerData(DataSpec):
    """Samples as dicts: tokens and their padding mask, images, a class, and following tokens.

    Attributes:
        fields: which of them a sample has.
    """

    fields: tuple[str, ...] = ("input_ids", "attention_mask")

    def loader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(self.seed)
        num, dtype = self.num_samples, getattr(torch, self.dtype)
        tokens = torch.randint(3, TOKENS, (num, LENGTH), generator=generator)
        real = torch.arange(LENGTH) < LENGTH - torch.arange(num)[:, None] % 3
        columns = {
            "input_ids": tokens.where(real, 0),
            "attention_mask": real.long(),
            "pixel_values": torch.randn(num, 3, 8, 8, generator=generator, dtype=dtype),
            "labels": torch.randint(CLASSES, (num,), generator=generator),
            "token_labels": torch.randint(3, TOKENS, (num, LENGTH), generator=generator),
        }
        samples = [{name: columns[name][i] for name in self.fields} for i in range(num)]
        return DataLoader(samples, batch_size=self.batch_size)  # type: ignore[arg-type]


class OwnLoss(SupervisedModule):
    """Hands the labels to the model, whose result carries the loss; ``module="model"``."""

    def __init__(self, build: Callable[[], nn.Module], optimizer: str) -> None:
        super().__init__(OptimizerSpec(optimizer))
        torch.manual_seed(2)
        self.model = build()

    def step_loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        named = {name.removeprefix("token_"): value for name, value in batch.items()}
        result = self.model(**named)
        return result.loss, [result.logits if "logits" in result else result.logits_per_image]


class Logits(OwnLoss):
    """The whole module is pipelined and gives logits; the loss is taken in the step."""

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.model(**inputs).logits

    def step_loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        inputs = {name: value for name, value in batch.items() if "labels" not in name}
        labels = batch["labels"] if "labels" in batch else batch["token_labels"]
        logits = self(**inputs)
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten()), [logits]


class PairScores(OwnLoss):
    """CLIP with a loss per pair of image and text instead of its contrast within the batch."""

    def forward(self, **inputs: Tensor) -> Tensor:
        result = self.model(**inputs)
        return (result.text_embeds * result.image_embeds).sum(1)

    def step_loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        scores = self(**batch)
        return F.softplus(-scores).mean(), [scores]


class Contrast(OwnLoss):
    """CLIP's own loss, which compares the samples of a batch."""

    def step_loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        result = self.model(**batch, return_loss=True)
        return result.loss, [result.logits_per_image]


def auto(head: str, kind: str, **options: Any) -> nn.Module:
    """A backbone with a head, as users build them."""
    import transformers

    config = transformers.AutoConfig.for_model(kind, **BACKBONES[kind], **options)
    model: nn.Module = getattr(transformers, f"AutoModelFor{head}").from_config(config)
    return model


bert = partial(auto, "SequenceClassification", "bert", num_labels=CLASSES)
gpt2 = partial(auto, "CausalLM", "gpt2")
llama = partial(auto, "CausalLM", "llama")
t5 = partial(auto, "Seq2SeqLM", "t5")
vit = partial(auto, "ImageClassification", "vit", num_labels=CLASSES)


def clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    text = {
        **SIZES,
        "vocab_size": TOKENS,
        "intermediate_size": 32,
        "max_position_embeddings": 16,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return CLIPModel(CLIPConfig(text_config=text, vision_config=IMAGES, projection_dim=8))
