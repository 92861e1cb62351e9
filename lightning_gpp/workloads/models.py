"""The models of the GraphPipe paper: Transformers with and without branches, recommenders.

Shapes: arXiv 2406.17145, appendix A.2 and A.3; what it leaves open of DLRM and CANDLE-Uno is from
its authors' code in FlexFlow pull request 308 (the launch script ``run_summit_large.sh`` for DLRM,
the defaults of its CANDLE-Uno example). Three things are ours:

- *Tensor cores.* The published 129 samples per second of MMT on four V100 (figure 6) are 21 Tflop/s
  per GPU, more than its float32 peak of 15.7; so products of Transformers are taken to be on tensor
  cores (16 bits, values stored as float32). Those of recommenders are in float32: the published
  rates stay below half of a V100's float32 peak.
- *Inputs* of Transformers are token numbers. Their table of embeddings, of which the paper gives no
  size, is left out, as are the features it would make: in the paper's runtime every GPU reads its
  own inputs.
- *Mini-batches.* The paper's table of their sizes is lost.
"""

from __future__ import annotations

from collections.abc import Iterable

from lightning_gpp.common.checks import check_counts, check_whole
from lightning_gpp.workloads.layers import ModelBuilder
from lightning_gpp.workloads.workload import Workload

TRANSFORMERS = "GraphPipe (ASPLOS 2025), appendix A.2"
RECOMMENDERS = f"{TRANSFORMERS}; FlexFlow pull request 308"

TENSOR_CORES = "float16"

TRANSFORMER_SAMPLES = 16
"""For every device: the paper's figure 7 has a mini-batch of 128 on 8 GPUs."""

DLRM_SAMPLES = 256
"""Of the launch script."""

CANDLE_SAMPLES = 64
"""The strategy file of pull request 308 for CANDLE-Uno on six GPUs has up to 384 samples in flight.
The smaller the mini-batch, the more of a step is warm-up and drain, and the more the depth of the
pipeline counts."""

CANDLE_FEATURES = {
    "dose1": 1,
    "dose2": 1,
    "cell_rnaseq": 942,
    "drug1_descriptors": 5270,
    "drug1_fingerprints": 2048,
    "drug2_descriptors": 5270,
    "drug2_fingerprints": 2048,
}
"""Inputs of CANDLE-Uno and their widths; with other numbers of branches they repeat."""


def mmt(
    num_branches: int = 4,
    layers_per_branch: int = 8,
    *,
    length: int = 256,
    hidden: int = 1024,
    num_heads: int = 16,
    feed_forward: int = 4096,
    samples_per_device: int = TRANSFORMER_SAMPLES,
    dtype: str = TENSOR_CORES,
) -> Workload:
    """The multi-modal Transformer: equal branches, joined at the end.

    Args:
        num_branches: parallel branches, one modality each.
        layers_per_branch: Transformer layers in each.
        length: tokens of a sample.
        hidden: features of a token.
        num_heads: heads of the attention.
        feed_forward: features between the two linear operators of a layer.
        samples_per_device: samples of a mini-batch for every device.
        dtype: what matrix products are computed in.

    Raises:
        ValueError: a number is below 1 or not whole.
    """
    check_counts(num_branches=num_branches, layers_per_branch=layers_per_branch)
    builder, shape = ModelBuilder(dtype), (layers_per_branch, length, hidden, num_heads)
    ends = [
        _transformer(builder, f"branches.{i}.", f"tokens{i}", *shape, feed_forward)
        for i in range(num_branches)
    ]
    joined = builder.concat("concat", ends)
    return builder.workload(f"mmt-{num_branches}", joined, samples_per_device, TRANSFORMERS)


def transformer(
    num_layers: int = 32,
    *,
    length: int = 256,
    hidden: int = 1024,
    num_heads: int = 16,
    feed_forward: int = 4096,
    samples_per_device: int = TRANSFORMER_SAMPLES,
    dtype: str = TENSOR_CORES,
) -> Workload:
    """A chain of Transformer layers, as many as MMT has (appendix A.3); arguments as there."""
    builder, shape = ModelBuilder(dtype), (num_layers, length, hidden, num_heads)
    end = _transformer(builder, "", "tokens", *shape, feed_forward)
    return builder.workload("transformer", end, samples_per_device, TRANSFORMERS)


def _transformer(
    builder: ModelBuilder,
    prefix: str,
    tokens: str,
    num_layers: int,
    length: int,
    hidden: int,
    num_heads: int,
    feed_forward: int,
) -> str:
    check_counts(num_layers=num_layers, length=length, hidden=hidden)
    check_counts(num_heads=num_heads, feed_forward=feed_forward)
    value = builder.indices(tokens, length)
    for layer in range(num_layers):
        name = f"{prefix}layers.{layer}"
        value = builder.attention(f"{name}.attention", value, length, hidden, num_heads)
        value = builder.linear(f"{name}.linear1", value, hidden, feed_forward, rows=length)
        value = builder.linear(f"{name}.linear2", value, feed_forward, hidden, rows=length)
    return value


def dlrm(
    num_dense: int = 7,
    num_sparse: int = 7,
    *,
    layers_per_branch: int = 4,
    hidden: int = 4096,
    dense_features: int = 2048,
    num_entries: int = 1_000_000,
    bag: int = 100,
    embedding_width: int = 64,
    top_layers: int = 4,
    samples_per_device: int = DLRM_SAMPLES,
    dtype: str = "float32",
) -> Workload:
    """The recommendation model: dense and sparse features side by side, then a common MLP.

    Args:
        num_dense: branches of dense features, each a multi-layer perceptron.
        num_sparse: branches of sparse features, each one table of embeddings.
        layers_per_branch: layers of a dense branch.
        hidden: width of all layers.
        dense_features: inputs of a dense branch.
        num_entries: rows of a table.
        bag: indices of a sample in a table; their rows are put one behind the other.
        embedding_width: width of a row.
        top_layers: layers of the common part, before the last one with a single output.
        samples_per_device: samples of a mini-batch for every device.
        dtype: what matrix products are computed in.

    Raises:
        ValueError: a number is too small or not whole, or there is no branch at all.
    """
    for name, count in (("dense", num_dense), ("sparse", num_sparse)):
        check_whole(f"num_{name}", count, least=0)
    check_whole("top_layers", top_layers, least=0)
    check_counts(hidden=hidden, dense_features=dense_features, layers_per_branch=layers_per_branch)
    check_counts(num_entries=num_entries, bag=bag, embedding_width=embedding_width)
    builder, layers = ModelBuilder(dtype), [hidden] * layers_per_branch
    ends = []
    for i in range(num_dense):
        value = builder.floats(f"dense{i}", dense_features)
        ends.append(_perceptron(builder, f"dense.{i}", value, [dense_features, *layers]))
    for i in range(num_sparse):
        value = builder.indices(f"sparse{i}", bag)
        ends.append(builder.embedding(f"sparse.{i}", value, num_entries, bag, embedding_width))
    width = num_dense * hidden + num_sparse * bag * embedding_width
    joined = builder.concat("concat", ends)
    top = _perceptron(builder, "top", joined, [width, *[hidden] * top_layers, 1])
    name = f"dlrm-{num_dense}+{num_sparse}"
    return builder.workload(name, top, samples_per_device, RECOMMENDERS)


def candle_uno(
    num_branches: int = 7,
    *,
    layers_per_branch: int = 4,
    hidden: int = 4096,
    samples_per_device: int = CANDLE_SAMPLES,
    dtype: str = "float32",
) -> Workload:
    """The drug response model: one multi-layer perceptron per feature, joined for one output.

    Args:
        num_branches: features; see :data:`CANDLE_FEATURES`.
        layers_per_branch: layers of each.
        hidden: width of all layers.
        samples_per_device: samples of a mini-batch for every device.
        dtype: what matrix products are computed in.

    Raises:
        ValueError: a number is below 1 or not whole.
    """
    check_counts(num_branches=num_branches, layers_per_branch=layers_per_branch, hidden=hidden)
    builder, features, ends = ModelBuilder(dtype), list(CANDLE_FEATURES.items()), []
    for i in range(num_branches):
        name, width = features[i % len(features)]
        value, widths = builder.floats(f"{name}_{i}", width), [width, *[hidden] * layers_per_branch]
        ends.append(_perceptron(builder, f"branches.{i}", value, widths))
    head = builder.linear("head", builder.concat("concat", ends), num_branches * hidden, 1)
    return builder.workload(f"candle-{num_branches}", head, samples_per_device, RECOMMENDERS)


def _perceptron(builder: ModelBuilder, name: str, value: str, widths: Iterable[int]) -> str:
    widths = list(widths)
    for layer, sizes in enumerate(zip(widths, widths[1:])):
        value = builder.linear(f"{name}.{layer}", value, *sizes)
    return value
