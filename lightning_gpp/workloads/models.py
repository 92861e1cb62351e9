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

from collections.abc import Sequence

from lightning_gpp.common.checks import check_counts, check_whole
from lightning_gpp.workloads.layers import ModelBuilder
from lightning_gpp.workloads.workload import Workload

TRANSFORMERS = "GraphPipe (ASPLOS 2025), appendix A.2"
RECOMMENDERS = f"{TRANSFORMERS}; FlexFlow pull request 308"

TENSOR_CORES = "float16"

LENGTH, HIDDEN, HEADS, FEED_FORWARD = 256, 1024, 16, 4096
"""Of Transformers: tokens of a sample, features of a token, heads of the attention, features
between the two linear operators of a layer."""

WIDTH, BRANCH_LAYERS = 4096, 4
"""Of recommenders: the width of all layers, layers of a branch."""

DENSE_FEATURES, NUM_ENTRIES, BAG, EMBEDDING_WIDTH, TOP_LAYERS = 2048, 1_000_000, 100, 64, 4
"""Of DLRM: inputs of a dense branch; rows of a table, indices of a sample in it (their rows are put
one behind the other) and the width of a row; layers of the common part, before the last one with a
single output."""

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
    samples_per_device: int = TRANSFORMER_SAMPLES,
) -> Workload:
    """The multi-modal Transformer: equal branches, one modality each, joined at the end.

    Args:
        num_branches: parallel branches.
        layers_per_branch: Transformer layers in each.
        samples_per_device: samples of a mini-batch for every device.

    Raises:
        ValueError: a number is below 1 or not whole.
    """
    check_counts(num_branches=num_branches, layers_per_branch=layers_per_branch)
    builder = ModelBuilder(TENSOR_CORES)
    ends = [
        _transformer(builder, f"branches.{i}.", f"tokens{i}", layers_per_branch)
        for i in range(num_branches)
    ]
    joined = builder.concat("concat", ends)
    return builder.workload(f"mmt-{num_branches}", joined, samples_per_device, TRANSFORMERS)


def transformer(num_layers: int = 32, *, samples_per_device: int = TRANSFORMER_SAMPLES) -> Workload:
    """A chain of Transformer layers, as many as MMT has (appendix A.3); arguments as there."""
    check_counts(num_layers=num_layers)
    builder = ModelBuilder(TENSOR_CORES)
    end = _transformer(builder, "", "tokens", num_layers)
    return builder.workload("transformer", end, samples_per_device, TRANSFORMERS)


def _transformer(builder: ModelBuilder, prefix: str, tokens: str, num_layers: int) -> str:
    value = builder.argument(tokens, builder.result(LENGTH, dtype="int64"))
    for layer in range(num_layers):
        name = f"{prefix}layers.{layer}"
        value = builder.attention(f"{name}.attention", value, LENGTH, HIDDEN, HEADS)
        value = builder.linear(f"{name}.linear1", value, HIDDEN, FEED_FORWARD, rows=LENGTH)
        value = builder.linear(f"{name}.linear2", value, FEED_FORWARD, HIDDEN, rows=LENGTH)
    return value


def dlrm(
    num_dense: int = 7, num_sparse: int = 7, *, samples_per_device: int = DLRM_SAMPLES
) -> Workload:
    """The recommendation model: dense and sparse features side by side, then a common MLP.

    Args:
        num_dense: branches of dense features, each a multi-layer perceptron.
        num_sparse: branches of sparse features, each one table of embeddings.
        samples_per_device: samples of a mini-batch for every device.

    Raises:
        ValueError: a number is too small or not whole, or there is no branch at all.
    """
    for name, count in (("num_dense", num_dense), ("num_sparse", num_sparse)):
        check_whole(name, count, least=0)
    builder, widths = ModelBuilder("float32"), [DENSE_FEATURES, *[WIDTH] * BRANCH_LAYERS]
    ends = []
    for i in range(num_dense):
        value = builder.argument(f"dense{i}", builder.result(DENSE_FEATURES))
        ends.append(_perceptron(builder, f"dense.{i}", value, widths))
    for i in range(num_sparse):
        value = builder.argument(f"sparse{i}", builder.result(BAG, dtype="int64"))
        ends.append(builder.embedding(f"sparse.{i}", value, NUM_ENTRIES, BAG, EMBEDDING_WIDTH))
    joined = builder.concat("concat", ends)
    width = num_dense * WIDTH + num_sparse * BAG * EMBEDDING_WIDTH
    top = _perceptron(builder, "top", joined, [width, *[WIDTH] * TOP_LAYERS, 1])
    name = f"dlrm-{num_dense}+{num_sparse}"
    return builder.workload(name, top, samples_per_device, RECOMMENDERS)


def candle_uno(num_branches: int = 7, *, samples_per_device: int = CANDLE_SAMPLES) -> Workload:
    """The drug response model: one multi-layer perceptron per feature, joined for one output.

    Args:
        num_branches: features; see :data:`CANDLE_FEATURES`.
        samples_per_device: samples of a mini-batch for every device.

    Raises:
        ValueError: a number is below 1 or not whole.
    """
    check_counts(num_branches=num_branches)
    builder, features, ends = ModelBuilder("float32"), list(CANDLE_FEATURES.items()), []
    for i in range(num_branches):
        name, width = features[i % len(features)]
        value = builder.argument(f"{name}_{i}", builder.result(width))
        widths = [width, *[WIDTH] * BRANCH_LAYERS]
        ends.append(_perceptron(builder, f"branches.{i}", value, widths))
    head = builder.linear("head", builder.concat("concat", ends), num_branches * WIDTH, 1)
    return builder.workload(f"candle-{num_branches}", head, samples_per_device, RECOMMENDERS)


def _perceptron(builder: ModelBuilder, name: str, value: str, widths: Sequence[int]) -> str:
    for layer, sizes in enumerate(zip(widths, widths[1:])):
        value = builder.linear(f"{name}.{layer}", value, *sizes)
    return value
