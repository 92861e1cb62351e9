"""Full-graph training: modules, graphs, and what ranks of tests do with them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as lp
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch_geometric.data import Data

from helpers.history_reference import Net
from helpers.training import make_trainer, quiet


def random_graph(num_vertices: int = 31, num_edges: int = 90, seed: int = 0) -> Data:
    """Directed edges with loops and repetitions; the last vertex is alone. In float64."""
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(0, num_vertices - 1, (2, num_edges), generator=generator)
    return Data(
        x=torch.randn(num_vertices, 5, generator=generator, dtype=torch.float64),
        edge_index=edges,
        y=torch.randint(0, 3, (num_vertices,), generator=generator),
        train_mask=torch.arange(num_vertices) % 3 > 0,
    )


class NodeClassifier(lp.LightningModule):
    """A :class:`Net` that classifies the vertices of one graph; masked loss."""

    def __init__(self, kind: str = "gcn", num_layers: int = 4, lr: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net, self.lr = Net(kind, num_layers), lr
        self.scores: list[Tensor] = []

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        scores: Tensor = self.net(x, edge_index)
        return scores

    def training_step(self, batch: Data, batch_idx: int) -> Tensor:
        scores = self(batch.x, batch.edge_index)
        self.scores.append(scores.detach().clone())
        loss = F.cross_entropy(scores[batch.train_mask], batch.y[batch.train_mask])
        self.log("train_loss", loss, batch_size=1)
        return loss

    def validation_step(self, batch: Data, batch_idx: int) -> None:
        scores = self(batch.x, batch.edge_index)
        rest = ~batch.train_mask
        self.log("val_loss", F.cross_entropy(scores[rest], batch.y[rest]), batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr, momentum=0.5)


@dataclass(frozen=True)
class FullGraphJob:
    """What is trained, and how long; picklable.

    Attributes:
        module: makes the module.
        graph: arguments of :func:`random_graph`.
        epochs: steps on the graph.
        precision: of the Trainer; None for module and graph of float64, else they are of float32.
    """

    module: Any = NodeClassifier
    graph: Mapping[str, Any] = field(default_factory=dict)
    epochs: int = 8
    precision: str | None = None


def sent_bytes(job: FullGraphJob, strategy: Mapping[str, Any], num_ranks: int) -> float:
    """Bytes of all messages between ranks in the last of three steps; on rank 0."""
    from lightning_gpp import TimelineCallback

    with tempfile.TemporaryDirectory() as folder:
        callback = TimelineCallback([2], dirpath=folder)
        trainer = _trainer(strategy, num_ranks, max_epochs=3, callbacks=[callback])
        _fit(trainer, job.module().double(), random_graph(**job.graph))
    if trainer.global_rank:
        return 0.0
    return sum(sent.size_bytes or 0 for sent, _ in callback.timelines[2].messages())


def _trainer(strategy: Mapping[str, Any] | None, num_ranks: int, **options: Any) -> lp.Trainer:
    ours = None
    if strategy is not None:
        ours = {"kind": "GNNPipeStrategy", "timeout": 100.0, **strategy}
    with quiet():
        return make_trainer(ours, num_ranks, **options)


def _fit(
    trainer: lp.Trainer, module: lp.LightningModule, graph: Data, *, val: bool = False
) -> None:
    loader = DataLoader([graph], batch_size=None)  # type: ignore[arg-type]
    with quiet():
        trainer.fit(module, loader, loader if val else None)


def fit(
    job: FullGraphJob,
    strategy: Mapping[str, Any] | None,
    num_ranks: int = 1,
    accelerator: Any = None,
) -> dict[str, Any]:
    """Trains as this process's rank.

    Args:
        job: what is trained.
        strategy: arguments of ``GNNPipeStrategy``; None trains on one plain device.
        num_ranks: ranks of the job.
        accelerator: of the Trainer; by default the one of the switch (``standin.switch``).

    Returns:
        The weights, the scores of every training step and the metrics.
    """
    module, graph = job.module().double(), random_graph(**job.graph)
    if job.precision is not None:
        module, graph = module.float(), graph.apply(_in_float32)
    options: dict[str, Any] = {"max_epochs": job.epochs, "precision": job.precision}
    if accelerator is not None:
        options |= {"accelerator": accelerator, "devices": num_ranks}
    trainer = _trainer(strategy, num_ranks, **options)
    _fit(trainer, module, graph, val=True)
    return {
        "weights": {n: p.detach().clone() for n, p in module.named_parameters() if not p.is_meta},
        "scores": module.scores,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }


def _in_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def refusal(graph: Data, module: lp.LightningModule, strategy: Mapping[str, Any]) -> str:
    """The error of a step on one device: its type and text."""
    trainer = _trainer({"chunks": 4, **strategy}, 1, max_epochs=1)
    try:
        _fit(trainer, module.double(), graph)
    except Exception as error:  # of any kind: the test looks at it
        return f"{type(error).__name__}: {error}"
    return "none"


class Perceptron(NodeClassifier):
    """Passes no messages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Linear(5, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Looks at vertices alone."""
        scores: Tensor = self.layers(x)
        return scores + 0 * edge_index.sum()


class OneLayer(NodeClassifier):
    """A graph convolution behind something else."""

    def __init__(self, before: nn.Module) -> None:
        super().__init__()
        from torch_geometric import nn as pyg

        self.stem, self.before, self.layer = nn.Linear(5, 3), before, pyg.GCNConv(3, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """One layer."""
        scores: Tensor = self.layer(self.before(self.stem(x)), edge_index)
        return scores


class OfBatches(NodeClassifier):
    """Is told which graph a vertex belongs to."""

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor | None = None) -> Tensor:
        """Scores, less the means of graphs."""
        from torch_geometric.utils import scatter

        scores: Tensor = self.net(x, edge_index)
        return scores if batch is None else scores - scatter(scores, batch, reduce="mean")[batch]

    def training_step(self, batch: Data, batch_idx: int) -> Tensor:
        scores = self(batch.x, batch.edge_index, batch.batch)
        return F.cross_entropy(scores[batch.train_mask], batch.y[batch.train_mask])
