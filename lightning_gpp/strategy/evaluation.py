"""Evaluation steps see the whole batch; only their calls of the pipelined forward are cut.

``validation_step``, ``test_step`` and ``predict_step`` run once per batch on rank 0, as on one
device, so whatever they log, collect and return is exact. Where they call the pipelined forward,
its *arguments* are cut into micro-batches along the dimensions that capture found to grow with
the samples, and the outputs are joined again.

Cutting is right only for a forward that treats every sample by itself. Whether it does is found
out, not assumed: the first call runs in one piece and once more in micro-batches, and calls are
cut from then on only if both agree. All others (in-batch similarities, graphs, a loss computed in
forward) run through the stages in one piece, which is always right and only less concurrent.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_gpp.capture.model import CapturedModel
from lightning_gpp.capture.structure import flatten
from lightning_gpp.runtime.pieces import cut
from lightning_gpp.strategy.logs import LogCall

log = logging.getLogger(__name__)

_RELATIVE_TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4}
_COARSE_TOLERANCE = 2e-2  # half precision

Dims = Mapping[str, tuple[int | None, ...]]
Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StepEnd:
    """What rank 0 tells the others at the end of an evaluation step.

    Attributes:
        calls: of ``self.log``.
        changes: of plain attributes and the like.
    """

    calls: list[LogCall]
    changes: dict[Any, Any]


class CannotJoinError(ValueError):
    """The outputs of micro-batches do not make up the output of the whole batch."""


@dataclass(slots=True)
class ForwardPass:
    """The boundary of one pass of given micro-batches through a forward-only program.

    Attributes:
        pieces: the tensor arguments of each micro-batch by value name.
        outputs: the model's outputs of each.
    """

    pieces: Sequence[Mapping[str, Tensor]]
    outputs: list[Values] = field(default_factory=list)

    def start(self, microbatch: int) -> Mapping[str, Tensor]:
        """The arguments of a micro-batch."""
        return self.pieces[microbatch]

    def finish(self, microbatch: int, outputs: Values) -> None:
        """Keeps its outputs; they come in order."""
        self.outputs.append(outputs)


class EvaluatedForward:
    """Stands in for the pipelined forward on rank 0 while an evaluation step runs.

    Args:
        captured: the captured forward.
        run: runs the pipeline on all ranks: (samples of each micro-batch, boundary).
        micro_batch_sizes: samples of each micro-batch for a number of samples.
        num_samples: of the batch; None where it cannot be told, then nothing is cut.
        step: name of the step that calls.
        is_separable: what was found out so far, by step and number of the call in it.
    """

    def __init__(
        self,
        captured: CapturedModel,
        run: Callable[[Sequence[int], ForwardPass], None],
        micro_batch_sizes: Callable[[int], list[int]],
        *,
        num_samples: int | None,
        step: str,
        is_separable: dict[tuple[str, int], bool],
    ) -> None:
        self._captured = captured
        self._run = run
        self._micro_batch_sizes = micro_batch_sizes
        self._num_samples = num_samples
        self._step = step
        self._is_separable = is_separable
        self._dims = batch_dims(captured)
        self._num_calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What forward returns for the whole batch."""
        self._captured.check_reads()
        inputs = self._captured.inputs(args, kwargs)
        key = (self._step, self._num_calls)
        self._num_calls += 1
        return self._captured.output(self._values(inputs, key))

    def _values(self, inputs: Mapping[str, Tensor], key: tuple[str, int]) -> Values:
        sizes = self._sizes(inputs)
        if sizes is None or not self._is_separable.get(key, True):
            return self._whole(inputs)
        whole = None if key in self._is_separable else self._whole(inputs)
        try:
            joined = join_values(self._outputs(inputs, sizes), self._dims, sizes)
        except CannotJoinError as error:
            reason: str | None = str(error)
        else:
            reason = None if whole is None else difference(joined, whole)
        self._is_separable[key] = reason is None
        if reason is not None:
            log.info("%s runs the forward in one piece per batch: %s", self._step, reason)
            return self._whole(inputs) if whole is None else whole
        return joined if whole is None else whole

    def _sizes(self, inputs: Mapping[str, Tensor]) -> list[int] | None:
        """Samples of each micro-batch; None where the call cannot be cut."""
        if self._captured.takes_graphs:
            return None
        if self._num_samples is None or call_size(inputs, self._dims) != self._num_samples:
            return None
        sizes = self._micro_batch_sizes(self._num_samples)
        return sizes if len(sizes) > 1 else None

    def _whole(self, inputs: Mapping[str, Tensor]) -> Values:
        return self._outputs(inputs, [self._num_samples or 1])[0]

    def _outputs(self, inputs: Mapping[str, Tensor], sizes: Sequence[int]) -> list[Values]:
        boundary = ForwardPass(cut_inputs(inputs, self._dims, sizes))
        self._run(sizes, boundary)
        return boundary.outputs


def batch_dims(captured: CapturedModel) -> Dims:
    """Value name -> dimension of the samples for each of its tensors."""
    return {
        name: tuple(spec.batch_dim for spec in value.tensors)
        for name, value in captured.graph.values.items()
    }


def call_size(inputs: Mapping[str, Tensor], dims: Dims) -> int | None:
    """Samples in one call of the forward; None where the inputs do not agree on it.

    >>> dims = {"x": (0,), "mask": (0,), "scale": (None,)}
    >>> call_size({"x": torch.ones(6, 2), "mask": torch.ones(6), "scale": torch.ones(2)}, dims)
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
    most_frequent = Counter(sizes).most_common(1)[0][0]
    return most_frequent if all(size % most_frequent == 0 for size in sizes) else None


def cut_inputs(
    inputs: Mapping[str, Tensor], dims: Dims, sizes: Sequence[int]
) -> list[dict[str, Tensor]]:
    """The arguments of each micro-batch; what is not per sample goes whole into each."""
    pieces: list[dict[str, Tensor]] = [{} for _ in sizes]
    for name, tensor in inputs.items():
        dim = dims[name][0]
        parts = [tensor] * len(sizes) if dim is None else cut(tensor, sizes, dim, name)
        for piece, part in zip(pieces, parts, strict=True):
            piece[name] = part
    return pieces


def join_values(outputs: Sequence[Values], dims: Dims, sizes: Sequence[int]) -> Values:
    """The outputs of the whole batch from those of its micro-batches.

    Raises:
        CannotJoinError: something that has no dimension of the samples differs between them.
    """
    return {
        name: _join([values[name] for values in outputs], dims.get(name, ()), sizes, name)
        for name in outputs[0]
    }


def _join(
    values: Sequence[Any], dims: Sequence[int | None], sizes: Sequence[int], name: str
) -> Any:
    flat = [flatten(value) for value in values]
    _, structure = flat[0]
    if any(other != structure for _, other in flat):
        raise CannotJoinError(f"output {name!r} differs in structure between micro-batches")
    of_tensors = iter(dims)
    joined = []
    for column in zip(*(found for found, _ in flat), strict=True):
        dim = next(of_tensors, None) if isinstance(column[0], Tensor) else None
        joined.append(_join_leaf(column, dim, sizes, name))
    return structure.unflatten(joined)


def _join_leaf(column: Sequence[Any], dim: int | None, sizes: Sequence[int], name: str) -> Any:
    first = column[0]
    if isinstance(first, Tensor) and dim is not None:
        per_sample = first.shape[dim] // sizes[0]
        if all(t.shape[dim] == per_sample * size for t, size in zip(column, sizes, strict=True)):
            try:
                return torch.cat(list(column), dim=dim)
            except RuntimeError as error:
                raise CannotJoinError(f"output {name!r} cannot be joined: {error}") from None
    elif all(_is_same(value, first) for value in column):
        return first
    raise CannotJoinError(f"output {name!r} is not one entry per sample")


def _is_same(value: Any, first: Any) -> bool:
    if isinstance(first, Tensor):
        return isinstance(value, Tensor) and (_has_no_values(value) or torch.equal(value, first))
    return value is first or (type(value) is type(first) and bool(value == first))


def _has_no_values(tensor: Tensor) -> bool:
    """Whether only shapes are there (emulated devices can do with them): no value differs."""
    return tensor.is_meta


def difference(joined: Values, whole: Values) -> str | None:
    """In which output two results differ by more than rounding; None if in none."""
    for name, expected in whole.items():
        leaves, structure = flatten(expected)
        got, got_structure = flatten(joined[name])
        same = structure == got_structure and all(map(_is_close, got, leaves))
        if not same:
            return f"output {name!r} of a sample depends on the other samples of its batch"
    return None


def _is_close(got: Any, want: Any) -> bool:
    if not isinstance(want, Tensor) or not isinstance(got, Tensor):
        return _is_same(got, want)
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    if _has_no_values(got):
        return True
    if not (want.is_floating_point() or want.is_complex()):
        return torch.equal(got, want)
    tolerance = _RELATIVE_TOLERANCE.get(want.dtype, _COARSE_TOLERANCE)
    scale = float(want.abs().nan_to_num(0, 0, 0).max()) if want.numel() else 0.0
    return torch.allclose(got, want, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
