"""The Transformers of the GraphPipe paper: MMT with branches, and the chain as long as it.

Shapes: arXiv 2406.17145, appendix A.2 and A.3. Two things are ours:

- *Tensor cores.* The published 129 samples per second on four V100 (figure 6) are 21 Tflop/s per
  GPU, more than its float32 peak of 15.7; so products are taken to be on tensor cores (16 bits,
  values stored as float32).
- *Inputs* are token numbers. Their table of embeddings, of which the paper gives no size, is left
  out, as are the features it would make: in the paper's runtime every GPU reads its own inputs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from lightning_gpp.common.checks import check_counts
from lightning_gpp.workloads.layers import ModelBuilder
from lightning_gpp.workloads.workload import Workload

SOURCE = "GraphPipe (ASPLOS 2025), appendix A.2"
TENSOR_CORES = "float16"

SAMPLES_PER_DEVICE = 16
"""The paper's figure 7 has a mini-batch of 128 on 8 GPUs; its table of the others is lost."""


@dataclass(frozen=True, slots=True)
class TransformerShape:
    """Sizes of a Transformer layer.

    Attributes:
        length: tokens of a sample.
        hidden: features of a token.
        num_heads: heads of the attention.
        feed_forward: features between the two linear operators.

    Raises:
        ValueError: a number is below 1 or not whole.
    """

    length: int = 256
    hidden: int = 1024
    num_heads: int = 16
    feed_forward: int = 4096

    def __post_init__(self) -> None:
        check_counts(**asdict(self))


def mmt(
    num_branches: int = 4,
    layers_per_branch: int = 8,
    *,
    length: int = 256,
    hidden: int = 1024,
    num_heads: int = 16,
    feed_forward: int = 4096,
    samples_per_device: int = SAMPLES_PER_DEVICE,
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
    builder = ModelBuilder(dtype)
    shape = TransformerShape(length, hidden, num_heads, feed_forward)
    ends = [
        _layers(builder, f"branches.{i}", f"tokens{i}", layers_per_branch, shape)
        for i in range(num_branches)
    ]
    return builder.workload(
        f"mmt-{num_branches}",
        builder.concat("concat", ends),
        samples_per_device=samples_per_device,
        source=SOURCE,
    )


def transformer(
    num_layers: int = 32,
    *,
    length: int = 256,
    hidden: int = 1024,
    num_heads: int = 16,
    feed_forward: int = 4096,
    samples_per_device: int = SAMPLES_PER_DEVICE,
    dtype: str = TENSOR_CORES,
) -> Workload:
    """A chain of Transformer layers, as many as MMT has (appendix A.3); arguments as there."""
    check_counts(num_layers=num_layers)
    builder = ModelBuilder(dtype)
    shape = TransformerShape(length, hidden, num_heads, feed_forward)
    return builder.workload(
        "transformer",
        _layers(builder, "", "tokens", num_layers, shape),
        samples_per_device=samples_per_device,
        source=SOURCE,
    )


def _layers(
    builder: ModelBuilder, prefix: str, tokens: str, num_layers: int, shape: TransformerShape
) -> str:
    value = builder.indices(tokens, shape.length)
    for layer in range(num_layers):
        name = f"{prefix}.layers.{layer}".removeprefix(".")
        value = builder.attention(
            f"{name}.attention", value, shape.length, shape.hidden, shape.num_heads
        )
        for part, sizes in enumerate(
            ((shape.hidden, shape.feed_forward), (shape.feed_forward, shape.hidden))
        ):
            value = builder.linear(f"{name}.linear{part + 1}", value, *sizes, rows=shape.length)
    return value
