"""Does the captured graph compute what the module computes? Outputs and gradients, both modes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpp.capture.checks.generators import Generators
from lightning_gpp.capture.checks.large_gradients import Digest, large_gradients
from lightning_gpp.capture.checks.rollback import rollback, seeded, training_flags
from lightning_gpp.capture.checks.rounding import COARSE, relative_tolerance
from lightning_gpp.capture.checks.tape import Tape, can_be_taped
from lightning_gpp.capture.checks.unchanged_parameters import unchanged_parameters
from lightning_gpp.capture.errors import CaptureError
from lightning_gpp.capture.model import CapturedModel
from lightning_gpp.capture.values.arguments import Arguments
from lightning_gpp.capture.values.host_weights import HostWeights
from lightning_gpp.capture.values.samples import Sample
from lightning_gpp.capture.values.structure import flatten
from lightning_gpp.capture.values.withheld import withhold
from lightning_gpp.common.mapped_tensor import is_mapped, mapped

_OF_FLOAT32 = 1e-5
_SEED = 20240521  # another than while tracing: numbers drawn then must not be frozen unnoticed


@dataclass(frozen=True, slots=True)
class Result:
    """What one forward gave, and its backward if there was one.

    Attributes:
        output: of forward.
        gradients: by parameter or input name; None where there is none. Empty without a backward.
            Of a parameter that lies in a file a digest, unless gradients were to be kept.
        buffers: by name, after the forward.
        changed: qualified names of the plain attributes that forward changed.
        kept: those of them that now hold a tensor which gradients flow through.
        draws: whether forward drew random numbers from torch.
        tape: what forward called, if it was the module's own and could be taped.
    """

    output: Any
    gradients: Mapping[str, Tensor | Digest | None]
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    changed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    draws: bool = False
    tape: Tape | None = None


def reference(
    module: nn.Module,
    arguments: Arguments,
    sample: Sample,
    flags: Mapping[str, bool],
    weights: HostWeights,
    *,
    backward: bool = True,
    keeps_gradients: bool = False,
) -> Result:
    """What the module itself computes."""

    def forward(tensors: dict[str, Tensor]) -> Any:
        args, kwargs = arguments.rebuild(tensors)
        return withhold(module.forward(*args, **kwargs))

    check = _Check(module, sample, flags, weights, backward, keeps_gradients, watched=True)
    return check.result(forward)


def replay(
    captured: CapturedModel,
    sample: Sample,
    flags: Mapping[str, bool],
    weights: HostWeights,
    *,
    training: bool,
    backward: bool = True,
    keeps_gradients: bool = False,
) -> Result:
    """What the captured graph computes, run as one stage."""
    graph = captured.graph
    names = [item.value.name for item in graph.inputs]
    stage = captured.stage([operator.name for operator in graph], names, graph.outputs)

    def forward(tensors: dict[str, Tensor]) -> Any:
        values = stage([tensors[name] for name in names], training=training)
        return captured.output(dict(zip(graph.outputs, values, strict=True)), training=training)

    return _Check(captured.module, sample, flags, weights, backward, keeps_gradients).result(
        forward
    )


class ValuesDifferError(CaptureError):
    """Two results have the same form and other values.

    Attributes:
        is_large: whether by more than rounding can explain in any precision.
    """

    def __init__(self, text: str, *, is_large: bool) -> None:
        super().__init__(text)
        self.is_large = is_large


class DigestsDifferError(Exception):
    """Two gradients that were not kept do not have the same bits."""


def compare(expected: Result, got: Result, what: str) -> None:
    """Compares two results.

    Raises:
        CaptureError: they differ; the message says in what and how much.
        ValuesDifferError: likewise, in values only.
        DigestsDifferError: gradients that were not kept differ, nobody knows by how much.
    """
    leaves, structure = flatten(expected.output)
    got_leaves, got_structure = flatten(got.output)
    if structure != got_structure:
        raise CaptureError(
            f"{what}: forward returns {structure}, the captured graph {got_structure}"
        )
    for path, leaf, got_leaf in zip(structure.paths(), leaves, got_leaves, strict=True):
        place = f" {[step.key for step in path]}" if path else ""
        _compare_leaf(leaf, got_leaf, f"{what}: output{place}")
    for name, gradient in expected.gradients.items():
        other = got.gradients[name]
        if not isinstance(gradient, Digest) or not isinstance(other, Digest):
            _compare_leaf(gradient, other, f"{what}: the gradient of {name!r}")
        elif gradient != other:
            raise DigestsDifferError(f"{what}: the gradient of {name!r} has other bits")
    for name, buffer in expected.buffers.items():
        _compare_leaf(buffer, got.buffers[name], f"{what}: the buffer {name!r} after forward")


@contextmanager
def in_float64(module: nn.Module) -> Iterator[None]:
    """The module computes in float64 as far as its own tensors decide that."""
    buffers = [
        (part._buffers, name, buffer)
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    values = [(parameter, parameter.data) for parameter in module.parameters()]
    try:
        for parameter, value in values:
            parameter.data = _as_float64(value)
        for table, name, buffer in buffers:
            table[name] = _as_float64(buffer)
        yield
    finally:
        for parameter, value in values:
            parameter.data = value
        for table, name, buffer in buffers:
            table[name] = buffer


def sample_in_float64(sample: Sample) -> Sample:
    """The same inputs in float64."""
    tensors = {
        name: _as_float64(tensor.detach()).requires_grad_(tensor.requires_grad)
        for name, tensor in sample.tensors.items()
    }
    return replace(sample, tensors=tensors)


def _as_float64(tensor: Tensor) -> Tensor:
    double = tensor.double() if tensor.is_floating_point() else tensor
    return mapped(double) if is_mapped(tensor) else double


@dataclass(frozen=True, slots=True)
class _Check:
    """What a forward, the module's or the captured graph's, is run with."""

    module: nn.Module
    sample: Sample
    flags: Mapping[str, bool]
    weights: HostWeights
    backward: bool
    keeps_gradients: bool
    watched: bool = False

    def result(self, forward: Callable[[dict[str, Tensor]], Any]) -> Result:
        """What the forward gives; it leaves no traces."""
        module, changed_copies = self.module, self.weights.changed
        changed_copies.clear()
        with rollback(module) as changes, unchanged_parameters(module, changed_copies):
            tape = Tape() if self.watched and can_be_taped(module, self.flags) else None
            output, gradients, draws = self._computed(forward, tape)
            buffers = {name: item.detach().clone() for name, item in module.named_buffers()}
        kept = tuple(changes.kept)
        attributes = tuple(changes.attributes)
        return Result(output, gradients, buffers, attributes, kept, draws, tape)

    def _computed(
        self, forward: Callable[[dict[str, Tensor]], Any], tape: Tape | None
    ) -> tuple[Any, dict[str, Tensor | Digest | None], bool]:
        module = self.module
        with training_flags(module, self.flags), seeded(_SEED), self._backward_in_eval_mode():
            inputs = self.sample.fresh()
            # a view, so that an in-place change is as legal as for an input that some layer made
            views = {name: t.view_as(t) if t.requires_grad else t for name, t in inputs.items()}
            generators = Generators(self.sample.device)
            with self.weights.visiting(watched=self.watched):
                output = forward(views) if tape is None else tape.record(forward, views)
            draws = generators.have_drawn()
            if not self.backward:
                return _detached(output), {}, draws
            for parameter in module.parameters():
                parameter.grad = None  # rollback puts it back
            loss = _any_loss(output)
            with (
                large_gradients(module, keeps=self.keeps_gradients) as digests,
                self.weights.visiting(),
            ):
                if loss is not None and torch.is_grad_enabled():
                    loss.backward()  # type: ignore[no-untyped-call]
            sources = dict(module.named_parameters()) | inputs
            gradients = {
                name: digests.get(item, item.grad)
                for name, item in sources.items()
                if item.requires_grad
            }
            return _detached(output), gradients, draws

    @contextmanager
    def _backward_in_eval_mode(self) -> Iterator[None]:
        """The recurrent layers of cuDNN go backward in training mode alone, torch's in both."""
        layers = (part for part in self.module.modules() if isinstance(part, nn.RNNBase))
        if self.backward and not all(layer.training for layer in layers):
            with torch.backends.cudnn.flags(enabled=False):
                yield
        else:
            yield


def _any_loss(output: Any) -> Tensor | None:
    """A scalar that depends on every element of the output in a different way."""
    generator = torch.Generator().manual_seed(0)
    loss = None
    for leaf in flatten(output)[0]:
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            weights = torch.empty_like(leaf)
            if not leaf.is_meta:
                weights = torch.rand(leaf.shape, generator=generator, dtype=torch.float64) + 0.5
            term = (leaf * weights.to(leaf)).sum()
            term = term.abs() if term.is_complex() else term
            loss = term if loss is None else loss + term.to(loss)
    return loss


def _detached(value: Any) -> Any:
    leaves, structure = flatten(value)
    return structure.unflatten(
        [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    )


def _compare_leaf(expected: Any, got: Any, what: str) -> None:
    if not isinstance(expected, Tensor) or not isinstance(got, Tensor):
        if type(expected) is not type(got) or (expected is not got and expected != got):
            raise CaptureError(f"{what} should be {_short(expected)}, is {_short(got)}")
        return
    if expected.shape != got.shape or expected.dtype != got.dtype:
        raise CaptureError(f"{what} should be {_short(expected)}, is {_short(got)}")
    if expected.is_meta:
        return  # shapes are all there is; ``capture`` says so
    if expected.layout is not torch.strided:
        expected, got = expected.to_dense(), got.to_dense()
    if not (expected.is_floating_point() or expected.is_complex()):
        if not torch.equal(expected, got):
            raise CaptureError(f"{what} differs")
        return
    if torch.equal(expected, got):  # as it is nearly always
        return
    tolerance = relative_tolerance(expected.dtype, of_float32=_OF_FLOAT32)
    scale = expected.abs().nan_to_num(0, 0, 0).max().item() if expected.numel() else 0.0
    if not torch.allclose(expected, got, rtol=tolerance, atol=tolerance * scale, equal_nan=True):
        error = (expected - got).abs().max().item()
        raise ValuesDifferError(
            f"{what} differs by {error:.3g} (its values go up to {scale:.3g})",
            is_large=not error <= COARSE * scale,
        )


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return repr(value)
