"""The theory: what every ATen operator does to its dimensions, kind by kind.

A function per family, a line per kind in :data:`SPECS`. A kind that is not here, or whose arguments
a function does not know (it returns None), is replicated, which is always sound. Kinds are those
that ``torch.export`` leaves in a model in training mode.

Left out on purpose:

- ``batch_norm`` in training: its statistics are those of the whole batch, and it changes buffers;
- dropout of summands: the devices would have to draw the same mask;
- a mean of losses, which is one over the samples that are not ignored;
- whatever would need a halo (a convolution divided along the image);
- ``embedding_bag``, whose further outputs are neither sharded nor sums where the first one is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from lightning_gpp.spmd.program import Option
from lightning_gpp.spmd.rules.call import ShapedCall
from lightning_gpp.spmd.rules.contractions import (
    addmm,
    attention,
    bilinear,
    convolution,
    einsum,
    linear,
    matmul,
)
from lightning_gpp.spmd.rules.factors import FactorSpec
from lightning_gpp.spmd.rules.indexing import (
    cat,
    embedding,
    expand,
    gather,
    index_add,
    index_select,
    one_hot,
    part_of,
    permute,
    reshape,
    scatter,
    select,
    split,
    stack,
    transpose,
    unbind,
)

SpecFunction = Callable[[ShapedCall], FactorSpec | None]


def elementwise(call: ShapedCall) -> FactorSpec | None:
    """Not linear: ``… -> …``, with broadcasting."""
    return call.dimensionwise()


def linear_unary(call: ShapedCall) -> FactorSpec | None:
    """A multiple of its input: ``… -> …``."""
    return replace(call.dimensionwise(), linear=(frozenset({0}),))


def addition(call: ShapedCall) -> FactorSpec | None:
    """Sum or difference; of two tensors it is linear in both together.

    A tensor that is broadcast along a dimension stays a summand of a summand: its devices' values
    sum to it.
    """
    spec = call.dimensionwise()
    return replace(spec, linear=(frozenset({0, 1}),)) if len(call.inputs) == 2 else spec


def product(call: ShapedCall) -> FactorSpec | None:
    """Linear in either factor."""
    return replace(
        call.dimensionwise(), linear=tuple(frozenset({i}) for i in range(len(call.inputs)))
    )


def quotient(call: ShapedCall) -> FactorSpec | None:
    """Linear in what is divided, unless it is rounded."""
    rounded = call.attribute("rounding_mode") is not None
    return call.dimensionwise() if rounded else linear_unary(call)


def along_whole_dim(call: ShapedCall) -> FactorSpec | None:
    """``dim`` is needed as a whole, every other dimension is on its own (softmax, sorting)."""
    return call.dimensionwise(whole=[call.dim(default=-1)])


def layer_norm(call: ShapedCall) -> FactorSpec | None:
    """The last dimensions are normalised together."""
    rank = len(call.inputs[0])
    last = range(rank - len(call.attribute("normalized_shape")), rank)
    return call.dimensionwise(whole=last)


def group_norm(call: ShapedCall) -> FactorSpec | None:
    """Every sample is on its own."""
    names = " ".join(f"x{dim}" for dim in range(2, len(call.inputs[0])))
    spec = call.by_argument(f"n c {names}", input=f"n c {names}", weight="c", bias="c")
    return replace(spec, whole=frozenset(spec.sizes) - {"n"})


def pooling(call: ShapedCall) -> FactorSpec | None:
    """Samples and channels are on their own; the output's image has other sizes."""
    rank = len(call.inputs[0])
    num_image = 1 if "1d" in call.operator.kind else 3 if "3d" in call.operator.kind else 2
    front = " ".join(f"n{dim}" for dim in range(rank - num_image))
    source = " ".join(f"i{dim}" for dim in range(num_image))
    target = " ".join(f"o{dim}" for dim in range(num_image))
    right = ", ".join([f"{front} {target}"] * len(call.outputs))
    spec = call.spec(f"{front} {source} -> {right}")
    whole = frozenset(name for name in spec.sizes if not name.startswith("n"))
    linear = (frozenset({0}),) if "avg" in call.operator.kind else ()
    return replace(spec, whole=whole, linear=linear)


def _reduction(call: ShapedCall) -> FactorSpec:
    rank, gone = len(call.inputs[0]), call.dims()
    keeps = bool(call.attribute("keepdim", False))
    left = [f"x{dim}" for dim in range(rank)]
    right = [
        "1" if dim in gone else name for dim, name in enumerate(left) if keeps or dim not in gone
    ]
    outputs = ", ".join([" ".join(right)] * len(call.outputs))
    return call.spec(f"{' '.join(left)} -> {outputs}")


def sum_of(call: ShapedCall) -> FactorSpec | None:
    """Sums over some dimensions."""
    return replace(_reduction(call), linear=(frozenset({0}),))


def mean(call: ShapedCall) -> FactorSpec | None:
    """Means: of a device's elements, by their part of all."""
    spec = _reduction(call)
    options = {f"x{dim}": Option.MEAN for dim in call.dims() if f"x{dim}" in spec.sizes}
    return replace(spec, linear=(frozenset({0}),), options=options)


def other_reduction(call: ShapedCall) -> FactorSpec | None:
    """Largest, variance: what is reduced is needed as a whole."""
    return replace(_reduction(call), whole=frozenset(f"x{dim}" for dim in call.dims()))


def cross_entropy(call: ShapedCall) -> FactorSpec | None:
    """Along the samples where losses are summed or kept; a mean skips what is ignored."""
    rank, reduction = len(call.inputs[0]), call.attribute("reduction", 1)
    target = call.index("target")
    if reduction == 1 or target is None or len(call.inputs[target]) != rank - 1 or rank < 2:
        return None
    rest = [f"x{dim}" for dim in range(2, rank)]
    samples = " ".join(["n", *rest])
    texts = {"self": " ".join(["n", "c", *rest]), "target": samples, "weight": "c"}
    spec = call.by_argument(samples if reduction == 0 else "", **texts)
    return replace(spec, whole=frozenset({"c"} & set(spec.sizes)))


_LINEAR_UNARY = ("alias", "clone", "contiguous", "neg", "detach", "lift_fresh")
_ELEMENTWISE = (
    *("relu", "gelu", "silu", "mish", "elu", "selu", "celu", "leaky_relu", "hardtanh", "relu6"),
    *("hardswish", "hardsigmoid", "softplus", "sigmoid", "log_sigmoid", "tanh", "erf", "exp"),
    *("expm1", "log", "log1p", "log2", "sqrt", "rsqrt", "reciprocal", "abs", "sign", "sin", "cos"),
    *("floor", "ceil", "round", "square", "pow", "clamp", "clamp_min", "clamp_max", "maximum"),
    *("minimum", "where", "masked_fill", "eq", "ne", "lt", "le", "gt", "ge", "logical_not"),
    *(
        "logical_and",
        "logical_or",
        "bitwise_not",
        "bitwise_and",
        "bitwise_or",
        "__or__",
        "__and__",
        "isnan",
        "isinf",
    ),
    *("dropout", "native_dropout", "threshold", "zeros_like", "ones_like", "full_like"),
    *("remainder", "floor_divide", "addcmul", "addcdiv", "lerp", "to", "_to_copy", "type_as"),
)
_VIEWS = ("view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "_unsafe_view")
_POOLING = (
    *("max_pool1d", "max_pool2d", "max_pool3d", "max_pool2d_with_indices"),
    *("avg_pool1d", "avg_pool2d", "avg_pool3d"),
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
    *("_adaptive_avg_pool2d", "adaptive_max_pool2d"),
)
_ALONG_WHOLE_DIM = (
    *("softmax", "_softmax", "log_softmax", "_log_softmax", "_safe_softmax", "cumsum", "cumprod"),
    *("sort", "argsort"),
)

SPECS: Mapping[str, SpecFunction] = MappingProxyType(
    {
        **dict.fromkeys(_LINEAR_UNARY, linear_unary),
        **dict.fromkeys(_ELEMENTWISE, elementwise),
        **dict.fromkeys(_VIEWS, reshape),
        **dict.fromkeys(_POOLING, pooling),
        **dict.fromkeys(_ALONG_WHOLE_DIM, along_whole_dim),
        **dict.fromkeys(("add", "sub", "rsub"), addition),
        "mul": product,
        "div": quotient,
        "layer_norm": layer_norm,
        "group_norm": group_norm,
        "sum": sum_of,
        "mean": mean,
        **dict.fromkeys(("amax", "amin", "argmax", "argmin"), other_reduction),
        **dict.fromkeys(("any", "all", "var", "std", "logsumexp"), other_reduction),
        **dict.fromkeys(("cross_entropy_loss", "nll_loss", "nll_loss_nd"), cross_entropy),
        # Products of matrices
        "linear": linear,
        "addmm": addmm,
        **dict.fromkeys(("matmul", "mm", "bmm", "mv"), matmul),
        "bilinear": bilinear,
        "einsum": einsum,
        **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), convolution),
        "scaled_dot_product_attention": attention,
        # Dimensions in another order, parts, look-ups
        "permute": permute,
        **dict.fromkeys(("transpose", "t", "swapaxes"), transpose),
        "expand": expand,
        "select": select,
        "slice": part_of,
        "narrow": part_of,
        **dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split"), split),
        "unbind": unbind,
        "cat": cat,
        "stack": stack,
        "embedding": embedding,
        "one_hot": one_hot,
        "gather": gather,
        **dict.fromkeys(("scatter", "scatter_add"), scatter),
        "index_select": index_select,
        "index_add": index_add,
        "topk": part_of,
    }
)
"""Kind -> its factors."""


def spec_of(call: ShapedCall) -> FactorSpec | None:
    """The factors of a call; None where nothing is known, or not of these arguments."""
    function = SPECS.get(call.operator.kind)
    if function is None or not call.outputs:
        return None
    return function(call)
