"""Inputs to try a captured graph on: the given one and one of another size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gpp.capture.values.graph_inputs import GraphInputs
from lightning_gpp.graph import ModelGraph


@dataclass(frozen=True, slots=True)
class Sample:
    """Tensors for every graph input.

    Attributes:
        tensors: input name -> tensor.
        num_samples: size of the micro-batch.
        graphs: what the inputs are where they are a batch of graphs.
    """

    tensors: Mapping[str, Tensor]
    num_samples: int
    graphs: GraphInputs | None = None

    @property
    def device(self) -> torch.device:
        """Of the inputs."""
        return next(iter(self.tensors.values())).device

    def fresh(self) -> dict[str, Tensor]:
        """Copies, as the caller would pass them."""
        copies = {}
        for name, tensor in self.tensors.items():
            copy = tensor.detach().clone()
            copies[name] = copy.requires_grad_() if tensor.requires_grad else copy
        return copies


def first_sample(tensors: Mapping[str, Tensor]) -> Sample:
    """The given input; its size is its number of graphs, or the most frequent first dimension."""
    if graphs := GraphInputs.find(tensors):
        return Sample(tensors, graphs.num_graphs, graphs)
    sizes = Counter(tensor.shape[0] for tensor in tensors.values() if tensor.dim())
    return Sample(tensors, sizes.most_common(1)[0][0] if sizes else 1)


def other_samples(sample: Sample) -> Iterator[Sample]:
    """Candidates for a second input: smaller, larger, and of the same size but permuted."""
    num = sample.num_samples
    if sample.graphs is not None:
        yield Sample(
            _with_flags(sample.tensors, sample.graphs.twice_and_a_node(sample.tensors)), 2 * num
        )
        return
    if num >= 3:
        half = (num + 1) // 2
        yield Sample(_along_batch(sample, torch.arange(half)), half)
    yield Sample(_along_batch(sample, torch.arange(2 * num) % num), 2 * num)
    yield Sample(_along_batch(sample, torch.arange(num).roll(1)), num)


def few_samples(sample: Sample, count: int) -> Sample:
    """The first ``count`` samples, or the first one over and over where there are not so many."""
    return Sample(_along_batch(sample, torch.arange(count) % sample.num_samples), count)


def resized(tensors: Mapping[str, Tensor], graph: ModelGraph, factor: float) -> dict[str, Tensor]:
    """The inputs of a micro-batch with ``factor`` times as many samples.

    The first of them, or all of them over and over; inputs without samples stay as they are. A
    batch of graphs can only be doubled (and a node).
    """
    if graphs := GraphInputs.find(tensors):
        assert factor == 2
        return _with_flags(tensors, graphs.twice_and_a_node(tensors))
    dims = {item.value.name: item.value.tensors[0].batch_dim for item in graph.inputs}
    return {name: _resized(tensor, dims[name], factor) for name, tensor in tensors.items()}


def _resized(tensor: Tensor, dim: int | None, factor: float) -> Tensor:
    if dim is None:
        return tensor
    length = tensor.shape[dim]
    index = torch.arange(round(length * factor), device=tensor.device) % length
    return tensor.detach().index_select(dim, index).requires_grad_(tensor.requires_grad)


def _along_batch(sample: Sample, rows: Tensor) -> dict[str, Tensor]:
    return {
        name: (
            tensor.detach()[rows.to(tensor.device)].requires_grad_(tensor.requires_grad)
            if tensor.dim() and tensor.shape[0] == sample.num_samples
            else tensor
        )
        for name, tensor in sample.tensors.items()
    }


def _with_flags(flagged: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Other tensors that ask for gradients where those of the same names do."""
    return {
        name: tensor.clone().requires_grad_(flagged[name].requires_grad)
        for name, tensor in tensors.items()
    }
