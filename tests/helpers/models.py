"""Fixed models, and the data that all models here are trained on.

:data:`FIXED_MODELS` are hand-made descriptions for :class:`~helpers.random_models.BranchyModel`;
:class:`TiedEmbeddings` and :class:`ExportableModel` are LightningModules of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from helpers.random_models import (
    INPUT_WIDTHS,
    NUM_TARGETS,
    WIDTH,
    ModelSpec,
    Node,
    OptimizerSpec,
    SupervisedModule,
)


def _chain(*kinds: str) -> tuple[Node, ...]:
    return tuple(Node(kind, (position,)) for position, kind in enumerate(kinds))


CHAIN = ModelSpec(1, _chain("mlp", "norm", "linear", "tanh", "mlp", "gelu", "linear"))
"""One straight line."""

TWO_TOWERS = ModelSpec(
    2,
    (
        Node("mlp", (0,)),
        Node("mlp", (1,)),
        Node("norm", (2,)),
        Node("tanh", (3,)),
        Node("linear", (4,)),
        Node("linear", (5,)),
        Node("cat", (6, 7)),
        Node("mlp", (8,)),
    ),
)
"""Two inputs, two branches of equal length, one join: stages of the towers run side by side."""

DIAMOND = ModelSpec(
    1,
    (
        Node("mlp", (0,)),
        Node("linear", (1,)),
        Node("mlp", (1,)),
        Node("mul", (2, 3)),
        Node("add", (4, 1)),
        Node("cat", (5, 0)),
    ),
    result="dict",
    extra_reads=(3,),
)
"""A fork and a join, with the fork's tensor and the input skipping over the branches."""

SIX_BRANCHES = ModelSpec(
    3,
    (
        *(Node("mlp", (i % 3,)) for i in range(6)),
        *(Node("norm", (3 + i,)) for i in range(6)),
        Node("cat", (9, 10, 11)),
        Node("cat", (12, 13, 14)),
        Node("cat", (15, 16)),
        Node("mlp", (17,)),
    ),
    signature="dict",
    loss="classification",
)
"""A multimodal model: six encoders, two levels of fusion, a classifier."""

SHARED_WEIGHTS = ModelSpec(
    2,
    (
        Node("linear", (0,)),
        Node("again", (1,), 2),
        Node("mul", (2, 3)),
        Node("scale", (4,)),
        Node("tied", (5,), 2),
        Node("add", (6, 2)),
    ),
    signature="tuple",
    result="nested",
    extra_reads=(3,),
)
"""One layer called twice, a weight used by a second layer, a parameter used directly."""

FIXED_MODELS = {
    "chain": CHAIN,
    "two_towers": TWO_TOWERS,
    "diamond": DIAMOND,
    "six_branches": SIX_BRANCHES,
    "shared_weights": SHARED_WEIGHTS,
}
"""Hand-made models by name."""


class TiedEmbeddings(SupervisedModule):
    """Token embeddings whose matrix is also the output layer, with two branches between.

    The input are whole numbers, which carry no gradient across stages.
    """

    num_tokens = 11
    length = 4

    def __init__(self, optimizer: OptimizerSpec | None = None) -> None:
        super().__init__(optimizer)
        torch.manual_seed(3)
        self.embed = nn.Embedding(self.num_tokens, WIDTH)
        self.left = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.right = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, self.num_tokens, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.embed(tokens)
        return self.out(self.norm(self.left(embedded) + self.right(embedded)))

    def step_loss(self, batch: tuple[tuple[Tensor, ...], Tensor]) -> tuple[Tensor, list[Tensor]]:
        (tokens,), _ = batch
        logits = self(tokens)
        following = tokens[:, 1:].flatten()
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), following)
        return loss, [logits]


class ExportableModel(SupervisedModule):
    """Two towers with hyperparameters that a checkpoint can hold.

    Args:
        hidden: features inside the towers.
        optimizer_name: as in :class:`OptimizerSpec`.
        scheduler: as in :class:`OptimizerSpec`.
    """

    def __init__(
        self, hidden: int = 6, optimizer_name: str = "adamw", scheduler: str | None = "step"
    ) -> None:
        super().__init__(OptimizerSpec(optimizer_name, scheduler=scheduler))
        self.save_hyperparameters()
        torch.manual_seed(4)
        self.left = nn.Sequential(nn.Linear(INPUT_WIDTHS[0], hidden), nn.Tanh())
        self.right = nn.Sequential(nn.Linear(INPUT_WIDTHS[1], hidden), nn.GELU())
        self.fuse = nn.Linear(2 * hidden, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, NUM_TARGETS)
        self.register_buffer("offset", torch.full((NUM_TARGETS,), 0.25))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        joined = torch.cat([self.left(left), self.right(right)], dim=1)
        return self.head(self.norm(self.fuse(joined))) + self.offset


@dataclass(frozen=True)
class DataSpec:
    """Deterministic random samples; the targets are a smooth function of the inputs.

    Attributes:
        num_samples: not a multiple of the batch size: the last batch is smaller.
        batch_size: samples of a mini-batch.
        num_inputs: inputs of a sample.
        tokens: whether the one input is a row of token numbers instead of features.
        seed: of the samples.
        dtype: of the samples and of the model, without ``torch.``.
    """

    num_samples: int = 29
    batch_size: int = 8
    num_inputs: int = 1
    tokens: bool = False
    seed: int = 7
    dtype: str = "float64"

    def tensors(self) -> tuple[tuple[Tensor, ...], Tensor]:
        """All inputs and targets."""
        generator = torch.Generator().manual_seed(self.seed)
        dtype = getattr(torch, self.dtype)
        if self.tokens:
            shape = (self.num_samples, TiedEmbeddings.length)
            tokens = torch.randint(TiedEmbeddings.num_tokens, shape, generator=generator)
            return (tokens,), torch.zeros(self.num_samples, NUM_TARGETS, dtype=dtype)
        inputs = tuple(
            torch.randn(self.num_samples, width, generator=generator, dtype=dtype)
            for width in INPUT_WIDTHS[: self.num_inputs]
        )
        return inputs, targets_of(inputs)

    def loader(self) -> torch.utils.data.DataLoader[Any]:
        """Batches ``(inputs, target)`` in a fixed order."""
        inputs, target = self.tensors()
        samples = [(tuple(x[i] for x in inputs), target[i]) for i in range(self.num_samples)]
        return torch.utils.data.DataLoader(samples, batch_size=self.batch_size)  # type: ignore[arg-type]


def targets_of(inputs: tuple[Tensor, ...]) -> Tensor:
    """The targets that belong to a batch of inputs."""
    total = sum(x.sin().sum(dim=-1) for x in inputs)
    return torch.stack([total, total.cos(), total.tanh()], dim=-1)


class SparseEmbeddings(TiedEmbeddings):
    """Tables with sparse gradients; another table is the output layer.

    Args:
        trains_tables_alone: with ``SparseAdam``, which takes nothing else.
    """

    def __init__(self, trains_tables_alone: bool = False) -> None:
        super().__init__()
        self.trains_tables_alone = trains_tables_alone
        self.embed = nn.Embedding(self.num_tokens, WIDTH, sparse=True)
        self.bag = nn.EmbeddingBag(self.num_tokens, WIDTH, mode="mean", sparse=True)
        self.out = nn.Linear(WIDTH, self.num_tokens, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.embed(tokens) + self.bag(tokens).unsqueeze(1)
        return self.out(self.norm(self.left(embedded) + self.right(embedded)))

    def configure_optimizers(self) -> Any:
        if self.trains_tables_alone:
            return torch.optim.SparseAdam([self.embed.weight, self.bag.weight], lr=0.05)
        return torch.optim.SGD(self.parameters(), lr=0.3)
