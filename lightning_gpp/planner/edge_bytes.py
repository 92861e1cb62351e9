"""How many bytes the values on an edge have at any micro-batch size.

Inputs that stages keep (:attr:`~lightning_gpp.graph.ModelGraph.staying`) are sent in the first step
alone, so they count for what a stage holds and not for what a step sends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_gpp.graph import ModelGraph, StageGraph


@dataclass(frozen=True, slots=True)
class EdgeBytes:
    """Bytes of some values: a part that grows with the samples, and a part that does not.

    Attributes:
        per_sample: bytes per sample of the values that go forward.
        fixed: bytes of those whose tensors are the same size for every micro-batch.
        kept: bytes of those that the stage keeps, which are not sent again.
        gradient_per_sample: bytes per sample of the gradients that come back.
        gradient_fixed: bytes of the gradients of tensors of a fixed size.
    """

    per_sample: float = 0.0
    fixed: float = 0.0
    kept: float = 0.0
    gradient_per_sample: float = 0.0
    gradient_fixed: float = 0.0

    def forward(self, num_samples: float) -> float:
        """Bytes forward for a number of samples."""
        return self.fixed + self.per_sample * num_samples

    def held(self, num_samples: float) -> float:
        """Bytes that the consumer holds for a number of samples."""
        return self.kept + self.forward(num_samples)

    def backward(self, num_samples: float) -> float:
        """Bytes of the gradients for a number of samples."""
        return self.gradient_fixed + self.gradient_per_sample * num_samples


def edge_bytes(graph: ModelGraph, values: Iterable[str], *, has_backward: bool = True) -> EdgeBytes:
    """The bytes of some values of a model.

    Args:
        graph: the model.
        values: their names.
        has_backward: whether gradients come back.
    """
    per_sample = fixed = kept = gradient_per_sample = gradient_fixed = 0.0
    for name in values:
        for spec in graph.values[name].tensors:
            has_gradient = has_backward and spec.is_differentiable
            if name in graph.staying:
                kept += spec.size_bytes
            elif spec.batch_dim is None:
                fixed += spec.size_bytes
                gradient_fixed += spec.size_bytes * has_gradient
            else:
                size_bytes = spec.size_bytes / graph.microbatch_size
                per_sample += size_bytes
                gradient_per_sample += size_bytes * has_gradient
    return EdgeBytes(per_sample, fixed, kept, gradient_per_sample, gradient_fixed)


def input_bytes(graph: ModelGraph, stages: StageGraph) -> dict[int, list[EdgeBytes]]:
    """Stage -> the bytes of what it reads, edge by edge.

    Args:
        graph: the model.
        stages: its stages.
    """
    found: dict[int, list[EdgeBytes]] = {stage: [] for stage in range(stages.num_stages)}
    for edge in stages.edges:
        found[edge.target].append(edge_bytes(graph, edge.values))
    return found
