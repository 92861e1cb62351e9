"""Factors of what moves elements: views, parts, look-ups."""

from __future__ import annotations

from dataclasses import replace

from lightning_gpp.spmd.program import Option
from lightning_gpp.spmd.rules.call import ShapedCall
from lightning_gpp.spmd.rules.factors import FactorSpec
from lightning_gpp.spmd.rules.views import reshape_spec

_FIRST = (frozenset({0}),)


def _names(rank: int, letter: str = "x") -> list[str]:
    return [f"{letter}{dim}" for dim in range(rank)]


def _moved(call: ShapedCall, left: list[str], right: list[str]) -> FactorSpec:
    """One input whose elements all outputs have, in places that do not depend on values."""
    outputs = ", ".join([" ".join(right)] * len(call.outputs))
    return replace(call.spec(f"{' '.join(left)} -> {outputs}"), linear=_FIRST)


def reshape(call: ShapedCall) -> FactorSpec | None:
    """See :mod:`lightning_gpp.spmd.rules.views`."""
    return reshape_spec(call.inputs[0], call.outputs[0])


def permute(call: ShapedCall) -> FactorSpec | None:
    """Dimensions in another order."""
    if call.attribute("dims") is None:
        return None
    names = _names(len(call.inputs[0]))
    return _moved(call, names, [names[dim] for dim in call.dims("dims")])


def transpose(call: ShapedCall) -> FactorSpec | None:
    """Two dimensions change places."""
    names = _names(len(call.inputs[0]))
    if len(names) < 2:
        return _moved(call, names, names)
    one = call.dim("dim0", call.attribute("axis0", 0))
    other = call.dim("dim1", call.attribute("axis1", 1))
    right = list(names)
    right[one], right[other] = names[other], names[one]
    return _moved(call, names, right)


def expand(call: ShapedCall) -> FactorSpec | None:
    """New and stretched dimensions may be dealt: every device stretches to its own length."""
    return replace(call.spec("… -> …"), linear=_FIRST)


def select(call: ShapedCall) -> FactorSpec | None:
    """One index of a dimension, which is gone."""
    names, dim = _names(len(call.inputs[0])), call.dim(default=0)
    spec = _moved(call, names, names[:dim] + names[dim + 1 :])
    return replace(spec, whole=frozenset({names[dim]}))


def part_of(call: ShapedCall) -> FactorSpec | None:
    """A part of a dimension: of another length; also the largest ones (``topk``)."""
    default = -1 if call.operator.kind == "topk" else 0
    names, dim = _names(len(call.inputs[0])), call.dim(default=default)
    if call.inputs[0] == call.outputs[0] and call.operator.kind != "topk":
        return _moved(call, names, names)
    right = list(names)
    right[dim] = "part"
    spec = replace(_moved(call, names, right), whole=frozenset({names[dim], "part"}))
    return replace(spec, linear=()) if call.operator.kind == "topk" else spec


def split(call: ShapedCall) -> FactorSpec | None:
    """Several parts of a dimension, each of a length of its own."""
    names, dim = _names(len(call.inputs[0])), call.dim(default=0)
    rights = []
    for number in range(len(call.outputs)):
        right = list(names)
        right[dim] = f"part{number}"
        rights.append(" ".join(right))
    spec = call.spec(f"{' '.join(names)} -> {', '.join(rights)}")
    whole = {names[dim], *(f"part{number}" for number in range(len(rights)))}
    return replace(spec, linear=_FIRST, whole=frozenset(whole))


def unbind(call: ShapedCall) -> FactorSpec | None:
    """Every index of a dimension."""
    return select(call)


def _tensors_along(call: ShapedCall) -> bool:
    return len({len(shape) for shape in call.inputs}) == 1


def cat(call: ShapedCall) -> FactorSpec | None:
    """Tensors one after the other along a dimension."""
    if not _tensors_along(call):
        return None
    names, dim = _names(len(call.inputs[0])), call.dim(default=0)
    lefts, whole = [], {"all"}
    for number in range(len(call.inputs)):
        left = list(names)
        left[dim] = f"part{number}"
        whole.add(left[dim])
        lefts.append(" ".join(left))
    right = list(names)
    right[dim] = "all"
    spec = call.spec(f"{', '.join(lefts)} -> {' '.join(right)}")
    together = (frozenset(range(len(call.inputs))),)
    return replace(spec, linear=together, whole=frozenset(whole))


def stack(call: ShapedCall) -> FactorSpec | None:
    """Tensors one after the other along a new dimension."""
    names = _names(len(call.inputs[0]))
    dim = call.dim(default=0, rank=len(names) + 1)
    lefts = ", ".join([" ".join(names)] * len(call.inputs))
    spec = call.spec(f"{lefts} -> {' '.join([*names[:dim], 'new', *names[dim:]])}")
    together = (frozenset(range(len(call.inputs))),)
    return replace(spec, linear=together, whole=frozenset({"new"}))


def embedding(call: ShapedCall) -> FactorSpec | None:
    """``v e, … -> … e``: along the indices, the width, and the vocabulary (a sum)."""
    if call.attribute("sparse", False) or call.attribute("scale_grad_by_freq", False):
        return None
    left, right = call.inputs[call.operator.arguments.index("indices")], call.outputs[0]
    names = " ".join(_names(len(left)))
    spec = call.by_argument(f"{names} e", weight="v e", indices=names)
    assert len(right) == len(left) + 1
    padded = int(call.attribute("padding_idx", -1)) >= 0
    return replace(
        spec,
        whole=frozenset({"v"}) if padded else frozenset(),
        options={"v": Option.VOCABULARY},
        linear=(frozenset({call.operator.arguments.index("weight")}),),
    )


def one_hot(call: ShapedCall) -> FactorSpec | None:
    """Indices with a new dimension of classes."""
    names = " ".join(_names(len(call.inputs[0])))
    return replace(call.spec(f"{names} -> {names} classes"), whole=frozenset({"classes"}))


def _indexed(call: ShapedCall, tensors: dict[str, str]) -> FactorSpec | None:
    """Look-ups along a dimension, where every tensor has all dimensions.

    A dimension besides is only on its own where all tensors have its whole length (an index may be
    of fewer rows than what it looks into).
    """
    rank, dim = len(call.inputs[0]), call.dim()
    shapes = [*call.inputs, *call.outputs]
    if any(len(shape) != rank for shape in shapes):
        return None

    def text(letter: str, shape: tuple[int, ...]) -> str:
        return " ".join(
            f"x{axis}" if axis != dim and len({s[axis] for s in shapes}) == 1 else f"{letter}{axis}"
            for axis in range(rank)
        )

    lefts = [
        text(tensors[argument], shape)
        for argument, shape in zip(call.operator.arguments, call.inputs)
    ]
    rights = [text(tensors["out"], shape) for shape in call.outputs]
    spec = call.spec(f"{', '.join(lefts)} -> {', '.join(rights)}")
    return replace(spec, whole=frozenset(name for name in spec.sizes if not name.startswith("x")))


def gather(call: ShapedCall) -> FactorSpec | None:
    """``out[i][j] = self[index[i][j]][j]``."""
    spec = _indexed(call, {"self": "s", "index": "i", "out": "i"})
    return None if spec is None else replace(spec, linear=_FIRST)


def scatter(call: ShapedCall) -> FactorSpec | None:
    """``self[index[i][j]][j] = src[i][j]``, or added to it."""
    return _indexed(call, {"self": "s", "index": "i", "src": "i", "out": "s"})


def index_select(call: ShapedCall) -> FactorSpec | None:
    """Rows by number: along the other dimensions, and along the numbers."""
    names, dim = _names(len(call.inputs[0])), call.dim(default=0)
    right = list(names)
    right[dim] = "row"
    spec = call.by_argument(" ".join(right), self=" ".join(names), index="row")
    return replace(spec, whole=frozenset({names[dim]}), linear=_FIRST)


def index_add(call: ShapedCall) -> FactorSpec | None:
    """Rows added to rows by number: along the other dimensions, and along the rows (a sum)."""
    names, dim = _names(len(call.inputs[0])), call.dim(default=0)
    source = list(names)
    source[dim] = "row"
    texts = {"self": " ".join(names), "index": "row", "source": " ".join(source)}
    spec = call.by_argument(" ".join(names), **texts)
    own, added = call.index("self"), call.index("source")
    assert own is not None and added is not None
    return replace(
        spec,
        whole=frozenset({names[dim]}),
        added=frozenset({own}),
        linear=(frozenset({own, added}),),
    )
