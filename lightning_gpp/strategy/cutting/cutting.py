"""Cuts the arguments of the pipelined forward, and joins outputs and results.

Arguments are cut into micro-batches along the dimensions that capture found to grow with the
samples, and the outputs of the micro-batches are joined again along theirs.
"""

from __future__ import annotations

import numbers
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_gpp.capture.checks.check import is_close
from lightning_gpp.capture.model import CapturedModel
from lightning_gpp.capture.values.samples import GraphInputs
from lightning_gpp.capture.values.structure import Structure, flatten
from lightning_gpp.common.host_copies import to_device, to_host
from lightning_gpp.common.torch_device import widened
from lightning_gpp.runtime.pieces import Slices
from lightning_gpp.strategy.cutting.graphs import graph_slices

_FEW_ROUNDINGS = 4
_DEPENDS = "output {!r} of a sample depends on the other samples of its batch"

Dims = Mapping[str, tuple[int | None, ...]]
Values = Mapping[str, Any]


class CannotJoinError(ValueError):
    """The outputs of micro-batches cannot be joined to the output of the batch."""


def call_size(captured: CapturedModel, inputs: Mapping[str, Tensor]) -> int | None:
    """Samples in one call of the forward; None where the inputs do not agree on it."""
    if captured.takes_graphs:
        graphs = GraphInputs.find(inputs)
        return None if graphs is None else graphs.num_graphs
    return size_by_dims(inputs, captured.graph.batch_dims)


def size_by_dims(inputs: Mapping[str, Tensor], dims: Dims) -> int | None:
    """Samples of tensors that have them in these dimensions; None where they do not agree.

    >>> dims = {"x": (0,), "mask": (0,), "scale": (None,)}
    >>> size_by_dims({"x": torch.ones(6, 2), "mask": torch.ones(6), "scale": torch.ones(2)}, dims)
    6
    """
    sizes = []
    for name, tensor in inputs.items():
        dim = dims[name][0]
        if dim is not None:
            if tensor.layout is not torch.strided or tensor.dim() <= dim:
                return None
            sizes.append(tensor.shape[dim])
    if not sizes or 0 in sizes:
        return None
    if len(set(sizes)) == 1:
        return sizes[0]
    most_frequent = Counter(sizes).most_common(1)[0][0]
    return most_frequent if all(size % most_frequent == 0 for size in sizes) else None


def input_slices(
    captured: CapturedModel, inputs: Mapping[str, Tensor], sizes: Sequence[int]
) -> dict[str, Slices] | None:
    """How the arguments of a call are cut; None where they cannot be.

    What is not per sample goes whole into each piece.

    Args:
        captured: the forward.
        inputs: its arguments by name.
        sizes: samples of each piece.
    """
    if len(sizes) == 1:
        return dict.fromkeys(inputs, Slices(None))
    if captured.takes_graphs:
        return graph_slices(inputs, sizes)
    dims, staying = captured.graph.batch_dims, captured.graph.staying
    return {
        name: Slices(None)
        if dim is None or name in staying
        else Slices.of_samples(dim, tensor.shape[dim] // sum(sizes), sizes)
        for name, tensor in inputs.items()
        for dim in dims[name][:1]
    }


def pieces_of(
    inputs: Mapping[str, Tensor], slices: Mapping[str, Slices], num_pieces: int
) -> list[dict[str, Tensor]]:
    """The arguments of each piece."""
    columns = {name: slices[name].cut(tensor, num_pieces) for name, tensor in inputs.items()}
    return [dict(zip(columns, parts, strict=True)) for parts in zip(*columns.values(), strict=True)]


def some_samples(
    captured: CapturedModel, inputs: Mapping[str, Tensor], count: int, total: int
) -> dict[str, Tensor]:
    """The arguments of some of the samples of a call that can be cut, from all over it.

    Of a batch of graphs those of the first.
    """
    if count == total:
        return dict(inputs)
    if captured.takes_graphs:
        slices = input_slices(captured, inputs, [count, total - count])
        assert slices is not None, "asked for when the number of pieces was chosen"
        return pieces_of(inputs, slices, 2)[0]
    chosen = torch.arange(count) * total // count
    return dict(at_rows(inputs, captured.graph.batch_dims, chosen, total))


def at_rows(values: Values, dims: Dims, rows: Tensor, num_samples: int) -> Values:
    """The same of other samples: those of ``rows``, in this order.

    Args:
        values: arguments or outputs of a call, by name.
        dims: of the samples, for every tensor; without any a value stays as it is.
        rows: numbers of samples.
        num_samples: of the call.
    """

    def selected(leaf: Any, dim: int | None) -> Any:
        if dim is None:
            return leaf
        entries = leaf.shape[dim] // num_samples
        index = rows[:, None] * entries + torch.arange(entries, device=rows.device)
        return leaf.index_select(dim, to_device(index.flatten(), leaf.device))

    return {
        name: structure.unflatten([selected(leaf, dim) for (leaf,), dim in columns])
        for name, columns, (structure,) in _in_columns([values], dims)
    }


def _in_columns(
    results: Sequence[Values], dims: Dims
) -> Iterator[tuple[str, list[tuple[tuple[Any, ...], int | None]], tuple[Structure, ...]]]:
    """Of every value in some results its name, its leaves and its structure in each of them.

    With the leaves comes the dimension of their samples; what is no tensor has none.
    """
    for name in results[0]:
        found, structures = zip(*[flatten(values[name]) for values in results], strict=True)
        left = iter(dims.get(name, ()))
        of_leaves = [next(left, None) if isinstance(leaf, Tensor) else None for leaf in found[0]]
        yield name, list(zip(zip(*found), of_leaves)), structures


def influence(
    whole: Values,
    again: Values,
    beside_others: Values,
    dims: Dims,
    num_samples: int,
    num_first: int,
) -> str | None:
    """In which output the first samples depend on the others; None if in none.

    Shapes are the same, and so is the arithmetic of a sample that no other touches: it has the
    same bits, so that influences far below the rounding of the whole show.

    Args:
        whole: outputs of a call.
        again: of the same call; where it differs, by that much two calls may.
        beside_others: of one with other samples beside the first.
        dims: of the samples, for every output.
        num_samples: of each call.
        num_first: samples that are the same in all three.
    """
    for name, columns, _ in _in_columns([whole, again, beside_others], dims):
        for column, dim in columns:
            if dim is not None:
                length = column[0].shape[dim] // num_samples * num_first
                if not _is_untouched(*(tensor.narrow(dim, 0, length) for tensor in column)):
                    return _DEPENDS.format(name)
    return None


def _is_untouched(first: Tensor, again: Tensor, beside_others: Tensor) -> bool:
    if torch.equal(first, beside_others):
        return True
    if not first.is_floating_point():
        return not torch.equal(first, again)  # nothing can be told
    first, again, other = (widened(t).nan_to_num() for t in (first, again, beside_others))
    noise = _FEW_ROUNDINGS * torch.finfo(beside_others.dtype).eps * float(first.abs().max())
    noise += _FEW_ROUNDINGS * float((again - first).abs().max())
    return float((other - first).abs().max()) <= noise


def join_values(
    outputs: Sequence[Values], dims: Dims, sizes: Sequence[int], *, averages: bool = False
) -> Values:
    """The outputs of the whole batch from those of its micro-batches.

    Args:
        outputs: of each micro-batch.
        dims: of the samples, for every output.
        sizes: samples of each micro-batch.
        averages: whether what is not one entry per sample is averaged, weighted by samples.

    Raises:
        CannotJoinError: something that has no dimension of the samples differs between them.
    """
    if len(outputs) == 1:
        return dict(outputs[0])
    joined: dict[str, Any] = {}
    for name, columns, structures in _in_columns(outputs, dims):
        if structures.count(structures[0]) < len(structures):
            raise CannotJoinError(f"output {name!r} differs in structure between micro-batches")
        leaves = [_join_leaf(column, dim, sizes, name, averages) for column, dim in columns]
        joined[name] = structures[0].unflatten(leaves)
    return joined


def _join_leaf(
    column: Sequence[Any], dim: int | None, sizes: Sequence[int], name: str, averages: bool
) -> Any:
    first = column[0]
    if dim is not None:
        per_sample = first.shape[dim] // sizes[0]
        if [t.shape[dim] for t in column] == [per_sample * size for size in sizes]:
            try:
                return torch.cat(list(column), dim=dim)
            except RuntimeError as error:
                raise CannotJoinError(f"output {name!r} cannot be joined: {error}") from None
    else:
        are_tensors = all(isinstance(v, Tensor) and v.shape == first.shape for v in column)
        if averages and are_tensors and all(value.is_floating_point() for value in column):
            return mean_over_samples(torch.stack(list(column)), sizes)
        if are_tensors:  # the host waits once
            flags = [(value == first).all() for value in column[1:]]
            are_same = all(to_host(flags))
        else:
            are_same = not isinstance(first, Tensor) and all(
                value is first or (type(value) is type(first) and bool(value == first))
                for value in column
            )
        if are_same:
            return first
    raise CannotJoinError(f"output {name!r} is not one entry per sample")


def difference(joined: Values, whole: Values) -> str | None:
    """In which output two results differ by more than rounding; None if in none."""
    for name, columns, structures in _in_columns([whole, joined], {}):
        is_same = structures[0] == structures[1]
        if not is_same or not all(is_close(got, expected) for (expected, got), _ in columns):
            return _DEPENDS.format(name)
    return None


# What the user's step returned for the micro-batches --------------------------------------------

_EQUAL_ANYWAY = (str, bytes, numbers.Number, type(None))


def combine_results(results: Sequence[Any], sizes: Sequence[int], place: str = "result") -> Any:
    """Joins the results of micro-batches to that of the whole mini-batch, detached.

    Tensors with one row per sample are concatenated; numbers and other tensors of floating point
    are averaged by samples; dicts are joined entry by entry; everything else must be equal.

    Args:
        results: of each micro-batch.
        sizes: samples of each.
        place: for the error text.

    Raises:
        ValueError: the results cannot be joined; the text says where.

    >>> combine_results([torch.tensor(1.0), torch.tensor(4.0)], [2, 1])
    tensor(2.)
    """
    first = results[0]
    if len(results) == 1:
        return pytree.tree_map_only(Tensor, Tensor.detach, first)
    if isinstance(first, Mapping):
        if any(result.keys() != first.keys() for result in results):
            raise ValueError(f"{place}: the micro-batches returned different keys")
        return {
            key: combine_results([r[key] for r in results], sizes, f"{place}[{key!r}]")
            for key in first
        }
    if isinstance(first, Tensor):
        return _combine_tensors([result.detach() for result in results], sizes, place)
    if isinstance(first, _EQUAL_ANYWAY) and all(result == first for result in results):
        return first
    if isinstance(first, numbers.Real):
        return sum(float(r) * n for r, n in zip(results, sizes, strict=True)) / sum(sizes)
    raise ValueError(
        f"{place}: {type(first).__name__} values of micro-batches cannot be joined; return tensors "
        "with one row per sample, or use num_microbatches=1 or schedule='gpipe'"
    )


def _combine_tensors(tensors: Sequence[Tensor], sizes: Sequence[int], place: str) -> Tensor:
    first = tensors[0]
    if first.dim() > 0 and all(t.shape[:1] == (n,) for t, n in zip(tensors, sizes, strict=True)):
        return torch.cat(list(tensors))
    if any(tensor.shape != first.shape for tensor in tensors):
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise ValueError(
            f"{place}: tensors of shapes {shapes} for micro-batches of {list(sizes)} samples "
            "cannot be joined; return one row per sample, or use num_microbatches=1"
        )
    stacked = torch.stack(list(tensors))
    mean, are_equal = mean_over_samples(stacked, sizes), (stacked == first).all(0)
    if stacked.is_floating_point():
        return torch.where(are_equal, first, mean)
    return first if are_equal.all() else mean


def mean_over_samples(values: Tensor, sizes: Sequence[int]) -> Tensor:
    """The mean of values of micro-batches; whole numbers have one of torch's default type.

    Added up in float32 at least: a float16 counts no further than to 65,504 samples, a bfloat16
    rounds beyond 256.

    Args:
        values: one row of each.
        sizes: samples of each.

    >>> mean_over_samples(torch.tensor([1.0, 4.0]).half(), [200_000, 100_000])
    tensor(2., dtype=torch.float16)
    """
    dtype = values.dtype if values.is_floating_point() else torch.get_default_dtype()
    wide = torch.promote_types(dtype, torch.float32)
    weights = to_device(torch.tensor(sizes, dtype=wide), values.device)
    weighted = values.to(wide) * weights.reshape(-1, *[1] * (values.dim() - 1))
    return (weighted.sum(0) / sum(sizes)).to(dtype)
