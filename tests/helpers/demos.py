"""Lightning's demo modules on data that needs no download."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as lp
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, DemoModel, RandomDataset
from lightning.pytorch.demos.lstm import LightningLSTM, SequenceSampler
from lightning.pytorch.demos.transformer import LightningTransformer, WikiText2
from torch import nn
from torch.utils.data import DataLoader

from helpers.models import DataSpec

VOCABULARY = 17
_WORDS = [f"word{number}" for number in range(VOCABULARY - 1)]  # and the end of a line


@dataclass(frozen=True)
class Vectors(DataSpec):
    """What the boring modules read: 64 random vectors."""

    width: int = 32

    def loader(self) -> DataLoader[Any]:
        torch.manual_seed(self.seed)
        data = RandomDataset(self.width, self.num_samples)
        data.data = data.data.to(getattr(torch, self.dtype))
        return DataLoader(data, batch_size=self.batch_size)


@dataclass(frozen=True)
class Words(DataSpec):
    """A small text, read by Lightning's ``WikiText2`` in place of the one it would download.

    Attributes:
        in_sequence: whether each batch goes on where the one before ended.
    """

    in_sequence: bool = False

    def loader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(self.seed)
        numbers = torch.randint(len(_WORDS), (40, 9), generator=generator)
        lines = [" ".join(_WORDS[number] for number in line) for line in numbers.tolist()]
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "wikitext-2.txt").write_text("\n".join([" ".join(_WORDS), *lines]))
            data = WikiText2(Path(folder), block_size=7, download=False)
        assert data.vocab_size == VOCABULARY
        if self.in_sequence:
            return DataLoader(data, batch_sampler=SequenceSampler(data, self.batch_size))
        return DataLoader(data, batch_size=self.batch_size)


def boring() -> lp.LightningModule:
    """One layer."""
    torch.manual_seed(0)
    return BoringModel()


def demo() -> lp.LightningModule:
    """One layer, Adam."""
    torch.manual_seed(0)
    return DemoModel()


def transformer() -> lp.LightningModule:
    """Encoder and decoder; dropout switched off, because its random numbers differ."""
    torch.manual_seed(0)
    return _for_a_test(LightningTransformer(VOCABULARY))


def lstm() -> lp.LightningModule:
    """A language model whose state goes on from batch to batch; smaller than by default."""
    from lightning.pytorch.demos.lstm import SimpleLSTM

    torch.manual_seed(0)
    module = LightningLSTM(VOCABULARY)
    module.model = SimpleLSTM(VOCABULARY, ninp=12, nhid=12, nlayers=2)
    return _for_a_test(module)


def _for_a_test(module: lp.LightningModule) -> lp.LightningModule:
    module.prepare_data = lambda: None  # type: ignore[method-assign]  # would download
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if isinstance(part, nn.MultiheadAttention | nn.LSTM):
            part.dropout = 0.0
    return module
