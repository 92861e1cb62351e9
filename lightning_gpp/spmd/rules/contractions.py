"""Factors of products: linear layers, matrix products, convolutions, attention."""

from __future__ import annotations

from dataclasses import replace

from lightning_gpp.spmd.rules.call import ShapedCall
from lightning_gpp.spmd.rules.factors import FactorSpec


def linear(call: ShapedCall) -> FactorSpec | None:
    """``… i, o i, o -> … o``: column-parallel along ``o``, row-parallel along ``i``."""
    spec = call.by_argument("… o", input="… i", weight="o i", bias="o")
    return _with_weight(spec, call, weight="weight", bias="bias", data="input")


def addmm(call: ShapedCall) -> FactorSpec | None:
    """``o, n i, i o -> n o``; the first is added and may have rows."""
    if (call.attribute("alpha", 1), call.attribute("beta", 1)) != (1, 1):
        return None
    added = call.inputs[0]
    text = "1" if added == (1,) else "… o" if len(added) == 2 else "o"
    spec = call.by_argument("n o", self=text.replace("…", "n"), mat1="n i", mat2="i o")
    return _with_weight(spec, call, weight="mat2", bias="self", data="mat1")


def _with_weight(
    spec: FactorSpec, call: ShapedCall, *, weight: str, bias: str, data: str
) -> FactorSpec:
    """What layers of a weight and a bias have in common."""
    bias_index, weight_index, data_index = map(call.index, (bias, weight, data))
    assert weight_index is not None and data_index is not None
    added = frozenset() if bias_index is None else frozenset({bias_index})
    samples = frozenset(spec.places(spec.inputs[data_index])) - {"i"}
    return replace(
        spec,
        added=added,
        linear=(frozenset({data_index}) | added, frozenset({weight_index}) | added),
        samples=samples,
        weight=weight_index if bias_index is None or len(call.inputs[bias_index]) == 1 else None,
    )


def matmul(call: ShapedCall) -> FactorSpec | None:
    """Products of matrices, vectors, and batches of them."""
    ranks = len(call.inputs[0]), len(call.inputs[1])
    left = "k" if ranks[0] == 1 else "n k" if ranks[0] == 2 else "… n k"
    right = "k" if ranks[1] == 1 else "k m" if ranks[1] == 2 else "… k m"
    batch = "…" if max(ranks) > 2 else ""
    rows = "" if ranks[0] == 1 else "n"
    columns = "" if ranks[1] == 1 else "m"
    spec = call.spec(f"{left}, {right} -> {batch} {rows} {columns}")
    return _product(spec)


def bilinear(call: ShapedCall) -> FactorSpec | None:
    """``… i, … j, o i j, o -> … o``."""
    spec = call.by_argument("… o", input1="… i", input2="… j", weight="o i j", bias="o")
    bias = call.index("bias")
    return replace(spec, added=frozenset() if bias is None else frozenset({bias}))


def _product(spec: FactorSpec) -> FactorSpec:
    return replace(spec, linear=tuple(frozenset({i}) for i in range(len(spec.inputs))))


def einsum(call: ShapedCall) -> FactorSpec | None:
    """The equation itself, where it names every dimension once per tensor."""
    equation = str(call.attribute("equation", "")).replace(" ", "")
    left, arrow, right = equation.partition("->")
    parts = left.split(",")
    if not arrow or "." in equation or any(len(set(p)) != len(p) for p in (*parts, right)):
        return None
    if [len(part) for part in parts] != [len(shape) for shape in call.inputs]:
        return None
    spaced = ", ".join(" ".join(part) for part in parts)
    return _product(call.spec(f"{spaced} -> {' '.join(right)}"))


def convolution(call: ShapedCall) -> FactorSpec | None:
    """``n c *, o c *, o -> n o *``: along samples, and channels of either side; one group."""
    if call.attribute("groups", 1) != 1 or call.attribute("transposed", False):
        return None
    num_image = len(call.inputs[1]) - 2
    if len(call.inputs[0]) != num_image + 2 or isinstance(call.attribute("padding"), str):
        return None

    def image(letter: str) -> str:
        return " ".join(f"{letter}{dim}" for dim in range(num_image))

    texts = {"input": f"n c {image('i')}", "weight": f"o c {image('k')}", "bias": "o"}
    spec = call.by_argument(f"n o {image('y')}", **texts)
    bias = call.index("bias")
    added = frozenset() if bias is None else frozenset({bias})
    return replace(
        spec,
        added=added,
        whole=frozenset(spec.sizes) - {"n", "c", "o"},
        linear=(frozenset({0}) | added, frozenset({1}) | added),
    )


def attention(call: ShapedCall) -> FactorSpec | None:
    """``… l d, … s d, … s v, (mask … l s) -> … l v``: along samples, heads, and queries.

    Queries only without ``is_causal``, which counts rows from the first that it is given. The
    factor of the keys is summed under a softmax, so it stays whole; heads of a grouped query
    differ in number, which no factor says.
    """
    if call.attribute("enable_gqa", False):
        return None
    texts = {"query": "… l d", "key": "… s d", "value": "… s v", "attn_mask": "… l s"}
    try:
        spec = call.by_argument("… l v", **texts)
    except KeyError:
        return None
    whole = {"d", "s"} | ({"l"} if call.attribute("is_causal", False) else set())
    value = call.index("value")
    assert value is not None
    no_dropout = not call.attribute("dropout_p", 0.0)
    linear = (frozenset({value}),) if no_dropout else ()
    return replace(spec, whole=frozenset(whole & set(spec.sizes)), linear=linear)
