"""The models of feature branches of the GraphPipe paper: DLRM and CANDLE-Uno.

Shapes: arXiv 2406.17145, appendix A.2; what it leaves open is from its authors' code in FlexFlow
pull request 308 (the launch script ``run_summit_large.sh`` for DLRM, the defaults of its CANDLE-Uno
example). Products are in float32: the published rates stay below half of a V100's float32 peak.
"""

from __future__ import annotations

from lightning_gpp.common.checks import check_counts, check_whole
from lightning_gpp.workloads.layers import ModelBuilder
from lightning_gpp.workloads.workload import Workload

SOURCE = "GraphPipe (ASPLOS 2025), appendix A.2; FlexFlow pull request 308"

DLRM_SAMPLES_PER_DEVICE = 256
"""Of the launch script. (The paper's table of mini-batch sizes is lost.)"""

CANDLE_SAMPLES_PER_DEVICE = 64
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
    samples_per_device: int = DLRM_SAMPLES_PER_DEVICE,
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
    check_whole("num_dense", num_dense, least=0)
    check_whole("num_sparse", num_sparse, least=0)
    check_counts(hidden=hidden, dense_features=dense_features, layers_per_branch=layers_per_branch)
    check_counts(num_entries=num_entries, bag=bag, embedding_width=embedding_width)
    check_whole("top_layers", top_layers, least=0)
    builder = ModelBuilder(dtype)
    ends = []
    for i in range(num_dense):
        value = builder.floats(f"dense{i}", dense_features)
        widths = [dense_features] + [hidden] * layers_per_branch
        ends.append(_perceptron(builder, f"dense.{i}", value, widths))
    for i in range(num_sparse):
        value = builder.indices(f"sparse{i}", bag)
        ends.append(builder.embedding(f"sparse.{i}", value, num_entries, bag, embedding_width))
    joined = builder.concat("concat", ends)
    width = num_dense * hidden + num_sparse * bag * embedding_width
    top = _perceptron(builder, "top", joined, [width] + [hidden] * top_layers + [1])
    return builder.workload(
        f"dlrm-{num_dense}+{num_sparse}",
        top,
        samples_per_device=samples_per_device,
        source=SOURCE,
    )


def candle_uno(
    num_branches: int = 7,
    *,
    layers_per_branch: int = 4,
    hidden: int = 4096,
    samples_per_device: int = CANDLE_SAMPLES_PER_DEVICE,
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
    builder = ModelBuilder(dtype)
    features = list(CANDLE_FEATURES.items())
    ends = []
    for i in range(num_branches):
        name, width = features[i % len(features)]
        value = builder.floats(f"{name}_{i}", width)
        widths = [width] + [hidden] * layers_per_branch
        ends.append(_perceptron(builder, f"branches.{i}", value, widths))
    joined = builder.concat("concat", ends)
    return builder.workload(
        f"candle-{num_branches}",
        builder.linear("head", joined, num_branches * hidden, 1),
        samples_per_device=samples_per_device,
        source=SOURCE,
    )


def _perceptron(builder: ModelBuilder, name: str, value: str, widths: list[int]) -> str:
    for layer, sizes in enumerate(zip(widths, widths[1:])):
        value = builder.linear(f"{name}.{layer}", value, *sizes)
    return value
