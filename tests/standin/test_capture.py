"""Models are captured where they run: on the device of rank 0, with weights that visit it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.models import INPUT_WIDTHS, NUM_TARGETS, DataSpec, OptimizerSpec
from helpers.random_models import SupervisedModule
from helpers.training import Training, train
from helpers.workers import WorkerPool
from torch import Tensor, nn

from lightning_gpp.capture import capture, profile_costs
from lightning_gpp.capture.errors import CaptureError
from lightning_gpp.capture.values.placed import on_device

WIDTH = 256


class Layer(nn.Module):
    """Reads its own weights in its forward, where no other module does it for it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.1)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.addmm(self.bias, self.norm(x), self.weight))


class Deep(nn.Module):
    """Layers, and others whose weights are read in other ways."""

    def __init__(self, *others: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(Layer() for _ in range(12)), *others)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.linspace(0.9, 1.1, WIDTH, device=next(self.parameters()).device)
        return self.head(self.layers(x * scale))


class Attention(nn.Module):
    """Reads the weight of a module in it without calling that."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None]
        return self.inner(x, x, x)[0][:, 0]


class Listed(nn.Module):
    """Has its weights in a list, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.weights = [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weights[0]


class Frozen(nn.Module):
    """Takes a weight where gradients are off, and uses it where they are on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            weight = self.weight
        return x * weight


def seen_of_capture(others: list[Callable[[], nn.Module]]) -> dict[str, Any]:
    """What capturing on a GPU takes of it, and leaves."""
    module = Deep(*(make() for make in others))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    objects = list(map(id, module.parameters()))
    x = torch.randn(8, WIDTH)
    there = x.to("cuda:0")
    random_state = torch.cuda.get_rng_state()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    captured = capture(module, (there,))
    torch.cuda.synchronize()
    peak_bytes = torch.cuda.max_memory_allocated() - start
    expected = capture(module, (x,))
    costs = profile_costs(captured, (there,), num_sizes=1)
    return {
        "part": peak_bytes / sum(parameter.nbytes for parameter in module.parameters()),
        "left_bytes": torch.cuda.memory_allocated() - start,
        "is_alike": captured.fingerprint == expected.fingerprint,
        "changing": captured.changing == expected.changing,
        "steady": captured.verified.steady == expected.verified.steady,
        "is_random": captured.verified.is_random,
        "num_measured": len(costs.profiles[0].operators) == len(captured.graph.operators),
        "random_state": torch.equal(random_state, torch.cuda.get_rng_state()),
        "weights": all(torch.equal(v, before[n]) for n, v in module.state_dict().items()),
        "objects": list(map(id, module.parameters())) == objects,
        "gradients": [n for n, p in module.named_parameters() if p.grad is not None],
    }


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "others", [[], [Attention], [Listed], [Frozen]], ids=["own", "attention", "listed", "frozen"]
)
def test_a_model_is_captured_layer_by_layer(
    gpus: WorkerPool, others: list[Callable[[], nn.Module]]
) -> None:
    """The same graph as on the CPU, with a part of the model on the GPU at a time."""
    found = gpus.run(seen_of_capture, others, num_ranks=1)[0]
    assert found.pop("part") < 0.7
    assert found.pop("left_bytes") < WIDTH * WIDTH  # constants in the graph
    assert found.pop("gradients") == []
    assert found == dict.fromkeys(found, True)


class Remembers(nn.Module):
    """Computes with a mean that an earlier call has left."""

    mean: Any = None

    def forward(self, x: Tensor) -> Tensor:
        now = x.detach().mean(0)
        self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        return x - 0.01 * self.mean


def error_of_capture() -> str:
    with pytest.raises(CaptureError) as caught:
        capture(Remembers(), (torch.randn(8, 3, device="cuda:0"),))
    return str(caught.value)


def test_memory_of_an_earlier_call_is_no_noise(gpus: WorkerPool) -> None:
    """Values that differ a little, where two runs of a GPU do not."""
    [text] = gpus.run(error_of_capture, num_ranks=1)
    assert "what an earlier call left in mean" in text


class Tied(nn.Module):
    """A weight with two names, a buffer that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
        self.other.weight = self.one.weight
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.other(self.one(x)))


def seen_of_visit() -> dict[str, bool]:
    """Whether tensors that visit a GPU are there, and are what they were after that."""
    module = Tied()
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    module.one.bias.grad = torch.ones(3)
    with on_device(tensors.values(), torch.device("cuda:0")):
        are_there = all(tensor.is_cuda for tensor in module.state_dict().values())
        module(torch.ones(4, 3, device="cuda:0")).sum().backward()
        has_gradient = module.other.weight.grad is not None
    after = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        "are there": are_there,
        "gradients there": has_gradient,
        "objects": all(tensor is tensors[name] for name, tensor in after.items()),
        "values": all(torch.equal(tensor, before[name]) for name, tensor in after.items()),
        "gradient": torch.equal(module.one.bias.grad, torch.ones(3)),
        "no other": module.one.weight.grad is None,
    }


def test_a_visit_leaves_no_trace(gpus: WorkerPool) -> None:
    found = gpus.run(seen_of_visit, num_ranks=1)[0]
    assert found == dict.fromkeys(found, True)


def measured(device: str) -> dict[str, tuple[int, float]]:
    """Bytes that operators keep, and their floating-point operations."""
    x = torch.ones(4, 3)
    costs = profile_costs(capture(Tied(), (x,)), (x.to(device),), num_sizes=1)
    operators = costs.profiles[0].operators.items()
    return {name: (cost.activation_bytes, cost.forward_flops) for name, cost in operators}


def test_operators_are_measured_where_the_micro_batch_is(gpus: WorkerPool) -> None:
    """The bytes that are kept do not count parameters, wherever these came from."""
    assert gpus.run(measured, "cuda:0", num_ranks=1)[0] == measured("cpu")


class OnGpusAlone(SupervisedModule):
    """A layer whose kernel is there for GPUs alone, or of ordinary operators.

    Args:
        is_custom: whether it is that kernel.
    """

    def __init__(self, is_custom: bool = True) -> None:
        super().__init__(OptimizerSpec("adamw"))
        torch.manual_seed(4)
        self.first, self.last = nn.Linear(INPUT_WIDTHS[0], 6), nn.Linear(6, NUM_TARGETS)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.is_custom = is_custom

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.is_custom:
            return self.last(scaled_tanh()(x, self.scale))
        return self.last(torch.tanh(x * self.scale))


def scaled_tanh() -> Any:
    """The operator; it is made once in a process."""
    name = "lightning_gpp_tests::scaled_tanh"
    if hasattr(torch.ops.lightning_gpp_tests, "scaled_tanh"):
        return torch.ops.lightning_gpp_tests.scaled_tanh

    @torch.library.custom_op(name, mutates_args=(), device_types="cuda")
    def operator(x: Tensor, scale: Tensor) -> Tensor:
        return torch.tanh(x * scale)

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        inner = gradient * (1 - torch.tanh(x * scale) ** 2)
        return inner * scale, (inner * x).sum(0)

    operator.register_fake(lambda x, scale: torch.empty_like(x))
    operator.register_autograd(
        backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
    )
    return torch.ops.lightning_gpp_tests.scaled_tanh


def of_ordinary_operators() -> OnGpusAlone:
    return OnGpusAlone(is_custom=False)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("devices", [None, ["cuda:0", "cuda:0"]], ids=["nccl", "pool"])
def test_kernels_for_gpus_alone_train(gpus: WorkerPool, devices: list[str] | None) -> None:
    expected = train(Training(of_ordinary_operators, num_steps=6), None)
    trainer = {} if devices is None else {"accelerator": "pool", "devices": devices}
    training = Training(OnGpusAlone, DataSpec(), num_steps=6, trainer=trainer)
    found = gpus.run(train, training, {"num_microbatches": 4}, 2, num_ranks=2)[0]
    assert found.losses == pytest.approx(expected.losses, rel=1e-9)
    for name, weight in expected.weights.items():
        assert found.weights[name].numpy() == pytest.approx(weight.numpy(), rel=1e-9)
