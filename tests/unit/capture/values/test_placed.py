"""Operators that visit a device; ``meta`` plays the GPU."""

from __future__ import annotations

import torch
from torch import nn

from lightning_gpp.capture import capture, placed, profile_costs
from lightning_gpp.capture.values.placed import Visits

META, CPU = torch.device("meta"), torch.device("cpu")


def test_nested_arguments_move_and_keep_what_they_are() -> None:
    wanted = torch.ones(2, requires_grad=True)
    args, kwargs = placed(((wanted, 3), {"rows": [torch.ones(1, dtype=torch.int64)]}), META)
    assert args[0].is_meta and args[0].requires_grad and args[0].is_leaf and args[1] == 3
    assert kwargs["rows"][0].is_meta and not kwargs["rows"][0].requires_grad
    assert placed(wanted, CPU) is wanted


class Tied(nn.Module):
    """A weight with two names, a buffer that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.other = nn.Linear(3, 3)
        self.other.weight = self.one.weight
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.other(self.one(x)))


def test_a_visit_leaves_no_trace() -> None:
    module = Tied()
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    visits = Visits(module, META)
    with visits.of(list(tensors)):
        assert all(tensor.is_meta for tensor in module.state_dict().values())
        assert module.one.weight is module.other.weight
        module(torch.ones(4, 3, device=META)).sum().backward()
        assert module.one.weight.grad is not None
    for name, tensor in {**dict(module.named_parameters()), **dict(module.named_buffers())}.items():
        assert tensor is tensors[name] and torch.equal(tensor, before[name]), name
        assert tensor.grad is None
    with visits.of(["one.weight"]):
        assert module.other.weight.is_meta and not module.one.bias.is_meta


def test_operators_are_measured_where_the_micro_batch_is() -> None:
    """The times of ``meta`` mean nothing; the bytes that are kept do not count parameters."""
    module = Tied()
    here, there = (torch.ones(4, 3, device=device) for device in (CPU, META))
    captured = capture(module, (here,))
    costs, on_meta = (profile_costs(captured, (x,), num_sizes=1) for x in (here, there))
    assert on_meta.profiles[0].device == "meta"
    for name, profile in costs.profiles[0].operators.items():
        other = on_meta.profiles[0].operators[name]
        assert other.activation_bytes == profile.activation_bytes, name
        assert other.forward_flops == profile.forward_flops, name
    assert not any(parameter.is_meta for parameter in module.parameters())
