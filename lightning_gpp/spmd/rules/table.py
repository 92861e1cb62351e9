"""The dimensions of every ATen operator, kind by kind.

A function per family, a line per family in :data:`SPECS`. A kind that is not here, or whose
arguments a function does not know (it returns None), is replicated, which is always sound. Kinds
are those that ``torch.export`` leaves in a model in training mode.

Left out on purpose:

- ``batch_norm`` in training: its statistics are those of the whole batch, and it changes buffers;
- dropout of summands: the devices would have to draw the same mask;
- a mean of losses, which is one over the samples that are not ignored;
- whatever would need a halo (a convolution divided along the image);
- ``embedding_bag``, whose further outputs are neither sharded nor sums where the first one is;
- ``gather`` and ``scatter``, whose tensors may differ in every length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lightning_gpp.spmd.program import Option
from lightning_gpp.spmd.rules.factors import FactorSpec, ShapedCall, reshape_spec

Spec = FactorSpec | None


def _put(names: list[str], dim: int, *new: str) -> list[str]:
    """The dimensions with others in the place of one."""
    return [*names[:dim], *new, *names[dim + 1 :]]


def _each(call: ShapedCall) -> list[set[int]]:
    """Linear in every input by itself."""
    return [{index} for index in range(len(call.inputs))]


# Element by element ------------------------------------------------------------------------------


def elementwise(call: ShapedCall) -> Spec:
    """Not linear: ``… -> …``, with broadcasting."""
    return call.dimensionwise()


def multiple(call: ShapedCall) -> Spec:
    """A multiple of its input."""
    return call.dimensionwise(linear=[{0}])


def addition(call: ShapedCall) -> Spec:
    """Sum or difference; of two tensors it is linear in both together.

    A tensor that is broadcast along a dimension stays a summand of a summand: its devices' values
    sum to it.
    """
    return call.dimensionwise(linear=[{0, 1}] if len(call.inputs) == 2 else [])


def product(call: ShapedCall) -> Spec:
    """Linear in either factor."""
    return call.dimensionwise(linear=_each(call))


def layer_norm(call: ShapedCall) -> Spec:
    """The last dimensions are normalised together."""
    rank = len(call.inputs[0])
    return call.dimensionwise(range(rank - len(call.get("normalized_shape")), rank))


def group_norm(call: ShapedCall) -> Spec:
    """Every sample is on its own."""
    samples, channels, *_ = names = call.names
    texts = {"input": " ".join(names), "weight": channels, "bias": channels}
    return call.by_argument(texts, " ".join(names), whole={*names} - {samples})


# Reductions --------------------------------------------------------------------------------------


def pooling(call: ShapedCall) -> Spec:
    """Samples and channels are on their own; the output's image has other sizes."""
    kind, names = call.operator.kind, call.names
    num_image = 1 if "1d" in kind else 3 if "3d" in kind else 2
    image = [f"y{dim}" for dim in range(num_image)]
    right = [*names[:-num_image], *image]
    whole = {*names[-num_image:], *image}
    linear = [{0}] if "avg" in kind else []
    return call.moved(*[right] * len(call.outputs), whole=whole, linear=linear)


def reduction(call: ShapedCall) -> Spec:
    """Sums, means (of a device's elements, by their part of all), and what is needed as a whole."""
    kind, names, gone = call.operator.kind, call.names, call.dims()
    keeps = call.get("keepdim", False)
    right = ["1" if d in gone else n for d, n in enumerate(names) if keeps or d not in gone]
    spec = call.moved(*[right] * len(call.outputs))
    reduced = {names[dim] for dim in gone}
    if kind == "mean":
        return replace(spec, options=dict.fromkeys(reduced & {*spec.sizes}, Option.MEAN))
    return spec if kind == "sum" else replace(spec, whole=reduced, linear=())


def cross_entropy(call: ShapedCall) -> Spec:
    """Along the samples where losses are summed or kept; a mean skips what is ignored."""
    names, reduced, target = call.names, call.get("reduction", 1), call.index("target")
    if reduced == 1 or len(names) < 2 or not target:
        return None
    if len(call.inputs[target.pop()]) != len(names) - 1:
        return None
    samples = " ".join(_put(names, 1))
    texts = {"self": " ".join(names), "target": samples, "weight": names[1]}
    return call.by_argument(texts, samples if reduced == 0 else "", whole={names[1]})


# Products of matrices ----------------------------------------------------------------------------


def linear(call: ShapedCall) -> Spec:
    """``… i, o i, o -> … o``: column-parallel along ``o``, row-parallel along ``i``."""
    return _layer(call, {"input": "… i", "weight": "o i", "bias": "o"}, "… o")


def addmm(call: ShapedCall) -> Spec:
    """``o, n i, i o -> n o``; the first is added and may have rows."""
    if (call.get("alpha", 1), call.get("beta", 1)) != (1, 1):
        return None
    added = call.inputs[0]
    bias = "1" if added == (1,) else "n o" if len(added) == 2 else "o"
    return _layer(call, {"mat1": "n i", "mat2": "i o", "self": bias}, "n o")


def _layer(call: ShapedCall, texts: dict[str, str], outputs: str) -> FactorSpec:
    """A layer of data, a weight and a bias, named in this order."""
    data, weight, bias = map(call.index, texts)
    return call.by_argument(texts, outputs, added=bias, linear=[data | bias, weight | bias])


def matmul(call: ShapedCall) -> Spec:
    """Products of matrices, vectors, and batches of them."""
    ranks = [len(shape) for shape in call.inputs]
    left = "k" if ranks[0] == 1 else "n k" if ranks[0] == 2 else "… n k"
    right = "k" if ranks[1] == 1 else "k m" if ranks[1] == 2 else "… k m"
    output = f"{'… ' * (max(ranks) > 2)}{'n ' * (ranks[0] > 1)}{'m' * (ranks[1] > 1)}"
    return call.spec(f"{left}, {right} -> {output}", linear=_each(call))


def einsum(call: ShapedCall) -> Spec:
    """The equation itself, where it names every dimension once per tensor."""
    equation = str(call.get("equation", "")).replace(" ", "")
    left, arrow, right = equation.partition("->")
    parts = left.split(",")
    if not arrow or "." in equation or any(len(set(p)) != len(p) for p in (*parts, right)):
        return None
    if [len(part) for part in parts] != [len(shape) for shape in call.inputs]:
        return None
    text = f"{', '.join(map(' '.join, parts))} -> {' '.join(right)}"
    return call.spec(text, linear=_each(call))


def convolution(call: ShapedCall) -> Spec:
    """``n c *, o c *, o -> n o *``: along samples, and channels of either side; one group."""
    num_image = len(call.inputs[1]) - 2
    is_strange = call.get("groups", 1) != 1 or call.get("transposed", False)
    if is_strange or len(call.inputs[0]) != num_image + 2 or isinstance(call.get("padding"), str):
        return None
    source, kernel, target = (" ".join(f"{s}{d}" for d in range(num_image)) for s in "iky")
    texts = {"input": f"n c {source}", "weight": f"o c {kernel}", "bias": "o"}
    spec = _layer(call, texts, f"n o {target}")
    return replace(spec, whole=spec.sizes.keys() - {"n", "c", "o"})


def attention(call: ShapedCall) -> Spec:
    """``… l d, … s d, … s v, (mask … l s) -> … l v``: along samples, heads, and queries.

    Queries only without ``is_causal``, which counts rows from the first that it is given. The
    factor of the keys is summed under a softmax, so it stays whole; heads of a grouped query
    differ in number, which no factor says.
    """
    texts = {"query": "… l d", "key": "… s d", "value": "… s v", "attn_mask": "… l s"}
    if call.get("enable_gqa", False) or not {*call.operator.arguments} <= texts.keys():
        return None
    whole = {"d", "s"} | ({"l"} if call.get("is_causal", False) else set())
    linear = [] if call.get("dropout_p", 0.0) else [call.index("value")]
    return call.by_argument(texts, "… l v", whole=whole, linear=linear)


# Dimensions in another order, parts, look-ups ----------------------------------------------------


def reshape(call: ShapedCall) -> Spec:
    """See :mod:`lightning_gpp.spmd.rules.factors`."""
    return reshape_spec(call.inputs[0], call.outputs[0])


def permute(call: ShapedCall) -> Spec:
    """Dimensions in another order."""
    return call.moved([call.names[dim] for dim in call.dims("dims")])


def transpose(call: ShapedCall) -> Spec:
    """Two dimensions change places."""
    names = call.names
    if len(names) > 1:
        one = call.dim("dim0", call.get("axis0", 0))
        other = call.dim("dim1", call.get("axis1", 1))
        names[one], names[other] = names[other], names[one]
    return call.moved(names)


def parts(call: ShapedCall) -> Spec:
    """Of a dimension one index, some, every one, or several parts, each of a length of its own."""
    kind, names = call.operator.kind, call.names
    if kind in ("slice", "narrow") and call.inputs == call.outputs:
        return call.moved(names)
    dim = call.dim(default=-1 if kind == "topk" else 0)
    if kind in ("select", "unbind"):
        return call.moved(*[_put(names, dim)] * len(call.outputs), whole={names[dim]})
    new = ["part"] * len(call.outputs) if kind == "topk" else _numbered(len(call.outputs))
    linear = [] if kind == "topk" else [{0}]
    rights = [_put(names, dim, each) for each in new]
    return call.moved(*rights, whole={names[dim], *new}, linear=linear)


def _numbered(count: int) -> list[str]:
    return [f"part{number}" for number in range(count)]


def cat(call: ShapedCall) -> Spec:
    """Tensors one after the other along a dimension, or along a new one (``stack``)."""
    names, together = call.names, [{*range(len(call.inputs))}]
    if len({len(shape) for shape in call.inputs}) > 1:
        return None
    if call.operator.kind == "stack":
        lefts, dim = [names] * len(call.inputs), call.dim(default=0, more=1)
        right = [*names[:dim], "all", *names[dim:]]
    else:
        dim = call.dim(default=0)
        lefts = [_put(names, dim, each) for each in _numbered(len(call.inputs))]
        right = _put(names, dim, "all")
    text = f"{', '.join(map(' '.join, lefts))} -> {' '.join(right)}"
    return call.spec(text, linear=together, whole={*_numbered(len(lefts)), "all"})


def scattered(call: ShapedCall) -> Spec:
    """One tensor in the place of a part of another one, along a dimension of that."""
    names, dim = call.names, call.dim(default=0)
    part = [] if call.operator.kind == "select_scatter" else ["part"]
    text = f"{' '.join(names)}, {' '.join(_put(names, dim, *part))} -> {' '.join(names)}"
    return call.spec(text, linear=[{0, 1}], whole={names[dim], *part})


def embedding(call: ShapedCall) -> Spec:
    """``v e, … -> … e``: along the indices, the width, and the vocabulary (a sum)."""
    if call.get("sparse", False) or call.get("scale_grad_by_freq", False):
        return None
    return call.by_argument(
        {"weight": "v e", "indices": "…"},
        "… e",
        whole={"v"} if int(call.get("padding_idx", -1)) >= 0 else set(),
        options={"v": Option.VOCABULARY},
        linear=[call.index("weight")],
    )


def one_hot(call: ShapedCall) -> Spec:
    """Indices with a new dimension of classes."""
    return call.moved([*call.names, "classes"], whole={"classes"}, linear=())


_TABLE: dict[str, Callable[[ShapedCall], Spec]] = {
    "alias clone contiguous neg detach lift_fresh expand": multiple,
    "relu gelu silu mish elu selu celu leaky_relu hardtanh relu6 hardswish hardsigmoid "
    "softplus sigmoid log_sigmoid tanh erf exp expm1 log log1p log2 sqrt rsqrt reciprocal abs "
    "sign sin cos floor ceil round square pow clamp clamp_min clamp_max maximum minimum where "
    "masked_fill eq ne lt le gt ge logical_not logical_and logical_or bitwise_not bitwise_and "
    "bitwise_or __or__ __and__ isnan isinf dropout native_dropout threshold zeros_like "
    "ones_like full_like remainder floor_divide addcmul addcdiv lerp to _to_copy "
    "type_as": elementwise,
    "add sub rsub": addition,
    "mul": product,
    "div": lambda call: (elementwise if call.get("rounding_mode") else multiple)(call),
    "softmax _softmax log_softmax _log_softmax _safe_softmax cumsum cumprod sort "
    "argsort": lambda call: call.dimensionwise([call.dim(default=-1)]),  # along the whole of it
    "layer_norm": layer_norm,
    "group_norm": group_norm,
    "max_pool1d max_pool2d max_pool3d max_pool2d_with_indices avg_pool1d avg_pool2d avg_pool3d "
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d "
    "adaptive_max_pool2d": pooling,
    "sum mean amax amin argmax argmin any all var std logsumexp": reduction,
    "cross_entropy_loss nll_loss nll_loss_nd": cross_entropy,
    "linear": linear,
    "addmm": addmm,
    "matmul mm bmm mv": matmul,
    "einsum": einsum,
    "conv1d conv2d conv3d convolution": convolution,
    "scaled_dot_product_attention": attention,
    "view reshape flatten unflatten unsqueeze squeeze _unsafe_view": reshape,
    "permute": permute,
    "transpose t swapaxes": transpose,
    "select unbind slice narrow topk split split_with_sizes chunk tensor_split": parts,
    "cat stack": cat,
    "slice_scatter select_scatter": scattered,
    "embedding": embedding,
    "one_hot": one_hot,
}

SPECS = {kind: function for kinds, function in _TABLE.items() for kind in kinds.split()}
"""Kind -> what gives its factors; None where they are not known of these arguments."""
