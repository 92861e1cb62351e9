"""Steps that run for every micro-batch: what they may do, and what is pointed to the default."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as lp
import pytest
import torch
import torchmetrics
from torch import Tensor, nn

from lightning_gpp.runtime.suspend import StepThreads
from lightning_gpp.strategy.cutting.cutting import combine_results
from lightning_gpp.strategy.logging.logs import joined_calls
from lightning_gpp.strategy.step import microbatch_steps
from lightning_gpp.strategy.step.microbatch_steps import MicrobatchSteps
from lightning_gpp.strategy.step.suspended_steps import OpenStep

Step = Callable[[lp.LightningModule, Tensor], Any]


class Doubling(lp.LightningModule):
    """Its forward runs elsewhere, where it doubles its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.metric = torchmetrics.MeanMetric()

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("the pipeline runs it")


@pytest.fixture
def threads() -> Iterator[StepThreads]:
    found = StepThreads()
    yield found
    found.close()


def run(threads: StepThreads, step: Step, sizes: tuple[int, ...] = (2, 1)) -> Any:
    """All steps up to the forward, then on to their ends, as a schedule with two in flight does."""
    module = Doubling()
    batch = torch.arange(float(sum(sizes)))
    captured: Any = SimpleNamespace(
        inputs_of_call=lambda args, kwargs: {"x": args[0]},
        output=lambda outputs: outputs["y"],
        check_reads=lambda: None,
        frozen=SimpleNamespace(keeping_leaves=nullcontext),
    )
    device = torch.device("cpu")
    of_rank: Any = SimpleNamespace(
        module=module,
        target=module,
        device=device,
        built=SimpleNamespace(captured=captured),
        pipeline=SimpleNamespace(captured=captured),
    )
    parts = zip(batch.split(sizes), sizes, strict=True)
    steps = [OpenStep(of_rank, partial(step, module, part), size, threads) for part, size in parts]
    boundary = MicrobatchSteps(of_rank)
    boundary.steps, boundary._total = dict(enumerate(steps)), sum(sizes)
    try:
        with boundary.intercepting():
            started = [boundary.start(index)["x"] for index in range(len(sizes))]
            read = [x.clone().requires_grad_() for x in started]
            losses = [
                boundary.finish(index, {"y": 2 * x * module.weight}) for index, x in enumerate(read)
            ]
    finally:
        boundary.abandon()
    assert "forward" not in vars(module) and "log" not in vars(module)
    torch.stack(losses).sum().backward()
    assert module.weight.grad is not None
    return SimpleNamespace(steps=steps, slope=float(module.weight.grad))


def test_losses_weighted_by_samples_make_that_of_the_batch(threads: StepThreads) -> None:
    def step(module: lp.LightningModule, x: Tensor) -> Any:
        loss = module(x + 1).square().mean()
        module.log("loss", loss)
        module.log("sum", loss, reduce_fx="sum", on_epoch=True)
        return {"loss": loss, "rows": x}

    found = run(threads, step)
    whole = (4 + 16 + 36) / 3
    assert found.slope == pytest.approx(2 * whole)
    results = [step.result for step in found.steps]
    result = combine_results(results, [2, 1])
    assert float(result["loss"]) == pytest.approx(whole) and result["rows"].tolist() == [0, 1, 2]
    logged_calls = [(call, each.size) for each in found.steps for call in each.logged]
    calls = joined_calls(logged_calls, torch.arange(3.0))
    logged = {call.name: float(call.value) for call in calls}  # type: ignore[arg-type]
    assert logged == {"loss": pytest.approx(whole), "sum": pytest.approx(10 + 36)}
    assert {call.kwargs["batch_size"] for call in calls} == {3}


def twice(module: lp.LightningModule, x: Tensor) -> Tensor:
    return (module(x) + module(x)).mean()


def under_autocast(module: lp.LightningModule, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return module(x).mean()


def logs_metric(module: lp.LightningModule, x: Tensor) -> Tensor:
    loss: Tensor = module(x).mean()
    module.log("metric", module.metric, on_step=True, on_epoch=True)  # type: ignore[arg-type]
    return loss


def logs_metric_by_default(module: lp.LightningModule, x: Tensor) -> Tensor:
    loss: Tensor = module(x).mean()
    module.log_dict({"metric": module.metric})  # type: ignore[dict-item]
    return loss


def logs_rows(module: lp.LightningModule, x: Tensor) -> Tensor:
    y: Tensor = module(x)
    module.log("rows", y.repeat(2))
    return y.mean()


def skips(module: lp.LightningModule, x: Tensor) -> None:
    module(x)


@pytest.mark.parametrize(
    ("step", "error", "text"),
    [
        (lambda module, x: module.weight * x.mean(), RuntimeError, "without calling the pipelined"),
        (twice, RuntimeError, "a second time.*concatenate the inputs"),
        (under_autocast, NotImplementedError, "under another torch.autocast.*inside of forward"),
        (logs_metric, NotImplementedError, "'metric'.*on_step=False"),
        (logs_metric_by_default, NotImplementedError, "'metric'.*on_step=False"),
        (logs_rows, ValueError, "'rows'.*expected one number"),
        (skips, TypeError, "returned NoneType for a micro-batch"),
        (lambda module, x: {"value": module(x).mean()}, TypeError, "dict with the key 'loss'"),
        (lambda module, x: module(x), ValueError, r"has shape \(2,\); expected one number"),
        (lambda module, x: module(x).mean().detach(), RuntimeError, "requires no gradient"),
        (lambda module, x: module(x).mean() + of_another_rank(), RuntimeError, "weight_decay"),
    ],
)
def test_what_only_a_step_on_the_whole_batch_can_do(
    threads: StepThreads, step: Step, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        run(threads, step)


def of_another_rank() -> Tensor:
    """As a parameter that another rank holds."""
    return torch.ones((), device="meta", requires_grad=True)


def test_an_error_in_one_step_ends_those_that_wait(threads: StepThreads) -> None:
    ended = []

    def step(module: lp.LightningModule, x: Tensor) -> Tensor:
        try:
            module(x)
            raise ArithmeticError(f"step of {len(x)}")
        finally:
            ended.append(len(x))

    with pytest.raises(ArithmeticError, match="step of 3"):
        run(threads, step, (3, 2, 1))
    assert sorted(ended) == [1, 2, 3]


def test_tf32_explains_differences_in_float32_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microbatch_steps, "is_tf32", lambda device: True)
    monkeypatch.setattr(microbatch_steps, "of_other_sizes", lambda device: 5e-3)
    types = torch.float64, torch.complex128, torch.float32
    rows = [torch.ones(3, dtype=dtype) for dtype in types]
    found = [microbatch_steps._differ([each], [1.001 * each], each) for each in rows]
    assert found == [True, True, False]
