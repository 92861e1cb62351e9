"""Measures what every operator of a captured model costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gpp.capture.model import CapturedModel
from lightning_gpp.capture.rollback import rollback
from lightning_gpp.capture.samples import first_sample
from lightning_gpp.capture.stage import StageModule
from lightning_gpp.capture.structure import flatten
from lightning_gpp.cost import OpProfile, Profile
from lightning_gpp.graph import OpNode


def profile(
    captured: CapturedModel,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    repeats: int = 3,
) -> Profile:
    """Runs the operators one by one and measures them.

    Each operator runs once to warm up and ``repeats`` times more, on detached inputs; the median
    counts. Saved activations are counted by storage, parameters left out. The module is left as
    it was.

    Args:
        captured: in the mode (train or eval) that its module is in.
        args: one micro-batch.
        kwargs: its keyword arguments.
        repeats: measured runs per operator.
    """
    tensors = captured.inputs(args, kwargs or {})
    values: dict[str, Any] = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        values[name].requires_grad_(tensor.requires_grad)
    device = next(iter(tensors.values())).device
    profiles = {}
    with rollback(captured.module), torch.inference_mode(False), torch.enable_grad():
        for operator in captured.graph:
            probe = _Probe(captured, operator, device)
            profiles[operator.name] = probe.measure(values, repeats)
            values |= probe.results
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Profile(profiles, first_sample(tensors).num_samples, name)


class _Probe:
    """Measures one operator."""

    def __init__(self, captured: CapturedModel, operator: OpNode, device: torch.device) -> None:
        self.outputs = tuple(value.name for value in operator.outputs)
        self.stage: StageModule = captured.stage([operator.name], operator.inputs, self.outputs)
        self.training = captured.module.training
        self.device = device
        self.parameters = [
            captured.module.get_parameter(name) for name in self.stage.parameter_names
        ]
        self.own_storages = {_storage(parameter) for parameter in self.parameters}
        self.results: dict[str, Any] = {}

    def measure(self, values: Mapping[str, Any], repeats: int) -> OpProfile:
        """Profile of the operator on the given values; keeps its results."""
        inputs = [values[name] for name in self.stage.inputs]
        runs = [self._run(inputs) for _ in range(repeats + 1)][1:]
        return OpProfile(
            forward_s=statistics.median(run.forward_s for run in runs),
            backward_s=statistics.median(run.backward_s for run in runs),
            activation_bytes=runs[0].activation_bytes,
        )

    def _run(self, values: Sequence[Any]) -> OpProfile:
        inputs = [_map_tensors(value, _detached_copy) for value in values]
        saved: dict[Any, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            key = _storage(tensor)
            if key not in self.own_storages:
                saved[key] = _stored_bytes(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            start_s = self._now_s()
            outputs = self.stage(inputs, training=self.training)
            forward_s = self._now_s() - start_s
        self.results = dict(zip(self.outputs, outputs, strict=True))
        return OpProfile(forward_s, self._backward_s(outputs), sum(saved.values()))

    def _backward_s(self, outputs: tuple[Any, ...]) -> float:
        roots = [leaf for leaf in flatten(outputs)[0] if _needs_grad(leaf)]
        if not roots:
            return 0.0
        for parameter in self.parameters:
            parameter.grad = None  # rollback puts it back
        seeds = [torch.ones_like(root) for root in roots]
        start_s = self._now_s()
        torch.autograd.backward(roots, seeds)
        return self._now_s() - start_s

    def _now_s(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _needs_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _detached_copy(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone()
    # a view of a leaf, so that the operator may change it in place
    return copy.requires_grad_().view_as(copy) if tensor.requires_grad else copy


def _map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    leaves, structure = flatten(value)
    return structure.unflatten(
        [function(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    )


def _storage(tensor: Tensor) -> Any:
    if tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.untyped_storage()._cdata


def _stored_bytes(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.element_size()
    return tensor.untyped_storage().nbytes()
