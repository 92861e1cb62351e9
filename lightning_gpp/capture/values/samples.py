"""Inputs to try a captured graph on: the given one and one of another size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gpp.capture.values.graph_inputs import GraphInputs
from lightning_gpp.graph import ModelGraph


@dataclass(frozen=True, slots=True, eq=False)
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


def other_content(sample: Sample) -> Sample:
    """Inputs that differ from the given ones in number and content.

    One more sample than there are; all are the first one. Numbers become smaller, which hardly any
    forward minds; of graphs there are twice as many.
    """
    count = sample.num_samples + 1
    tensors = _along_batch(sample, torch.zeros(count, dtype=torch.int64))
    if sample.graphs is not None:
        count = 2 * sample.num_samples
        tensors = sample.graphs.twice_and_a_node(sample.tensors)
    scaled = {
        name: t.detach() * 0.75 if t.is_floating_point() or t.is_complex() else t.detach()
        for name, t in tensors.items()
    }
    return Sample(_with_flags(sample.tensors, scaled), count)


def resized(tensors: Mapping[str, Tensor], graph: ModelGraph, factor: float) -> dict[str, Tensor]:
    """The inputs of a micro-batch with ``factor`` times as many samples.

    The first of them, or all of them over and over; inputs without samples stay as they are. A
    batch of graphs can only be doubled (and a node).
    """
    if graphs := GraphInputs.find(tensors):
        assert factor == 2
        return _with_flags(tensors, graphs.twice_and_a_node(tensors))
    made = dict(tensors)
    for item in graph.inputs:
        name, dim = item.value.name, item.value.tensors[0].batch_dim
        if dim is not None:
            length = tensors[name].shape[dim]
            rows = torch.arange(round(length * factor), device=tensors[name].device) % length
            made[name] = tensors[name].detach().index_select(dim, rows)
    return _with_flags(tensors, made)


def _along_batch(sample: Sample, rows: Tensor) -> dict[str, Tensor]:
    chosen = {
        name: tensor.detach()[rows.to(tensor.device)]
        for name, tensor in sample.tensors.items()
        if tensor.dim() and tensor.shape[0] == sample.num_samples
    }
    return {**sample.tensors, **_with_flags(sample.tensors, chosen)}


def _with_flags(flagged: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Other tensors that ask for gradients where those of the same names do."""
    return {
        name: tensor.detach().clone().requires_grad_(flagged[name].requires_grad)
        for name, tensor in tensors.items()
    }
