"""Every precision trains as it does on one device, within its own rounding."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as lp
import pytest
import torch
import torch.distributed as dist
from helpers.models import FIXED_MODELS, DataSpec
from helpers.plans import captured_graph, random_plan
from helpers.random_models import BranchyModel, ModelSpec, OptimizerSpec, model_specs
from helpers.records import heard
from helpers.reference import relative_error, train_one_of_their_devices, train_pipeline
from helpers.training import Result, Training, float16_mixed
from helpers.workers import WorkerPool
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.amp import GradScaler

from lightning_gpp.runtime.run_state import ActionRecord
from lightning_gpp.schedule import Kind
from lightning_gpp.strategy.state.precision import (
    AgreedScaler,
    loss_scale,
    pipeline_precision,
)

ROUNDING = {
    "64-true": 1e-9,
    "32-true": 1e-5,
    "16-mixed": 8 * 2**-11,
    "bf16-mixed": 8 * 2**-8,
    "16-true": 16 * 2**-11,
    "bf16-true": 16 * 2**-8,
}
"""Largest difference after ten steps, relative to the largest weight of a tensor (or 1): some units
in the last place of the precision, more of them where the weights themselves are rounded."""


def options(precision: str, **scaler: Any) -> dict[str, Any]:
    """Arguments of the Trainer."""
    if precision != "16-mixed":
        return {"precision": precision}
    return {"plugins": [float16_mixed(**scaler)]}


def training_of(spec: ModelSpec, precision: str, **others: Any) -> Training:
    dtype = "float64" if precision == "64-true" else "float32"
    return Training(
        partial(BranchyModel, spec, OptimizerSpec(lr=0.05)),
        DataSpec(num_inputs=spec.num_inputs, dtype=dtype),
        num_steps=10,
        validate=False,
        **{"trainer": options(precision), **others},
    )


def both(
    pool: WorkerPool, training: Training, num_ranks: int, **strategy: Any
) -> tuple[Result, list[Result]]:
    """One device, and the ranks; plugins have state, which neither run leaves to the other."""
    return train_one_of_their_devices(training), train_pipeline(
        pool, training, num_ranks=num_ranks, **strategy
    )


@settings(
    max_examples=max(6, settings.default.max_examples // 4),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
@given(
    spec=model_specs(),
    precision=st.sampled_from(["bf16-mixed", "16-mixed", "bf16-mixed", "bf16-true", "16-true"]),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
    num_ranks=st.integers(1, 4),
    num_microbatches=st.integers(1, 4),
    plan_seed=st.integers(0, 999),
    clips=st.booleans(),
)
def test_random_models(
    pool: WorkerPool,
    spec: ModelSpec,
    precision: str,
    schedule: str,
    num_ranks: int,
    num_microbatches: int,
    plan_seed: int,
    clips: bool,
) -> None:
    # With a scale of 65536 the gradient of a whole batch may overflow where those of parts do not.
    training = training_of(spec, precision, trainer=options(precision, init_scale=16.0))
    graph = captured_graph(training)
    if clips:
        training = replace(training, trainer={**training.trainer, "gradient_clip_val": 0.3})
    plan = random_plan(graph, num_devices=min(num_ranks, len(graph)), seed=plan_seed)
    one, ranks = both(
        pool,
        training,
        plan.num_devices,
        num_microbatches=num_microbatches,
        schedule=schedule,
        plan=plan,
    )
    limit = ROUNDING[precision]
    for name, weight in one.weights.items():
        assert ranks[0].weights[name].dtype == weight.dtype
        assert relative_error(ranks[0].weights[name], weight) <= limit, (precision, name)
    for rank in ranks:
        assert max(abs(a - b) for a, b in zip(rank.losses, one.losses, strict=True)) <= 4 * limit


@pytest.mark.sampled(5)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("precision", sorted(ROUNDING))
def test_without_cuts_the_bits_are_those_of_one_device(
    pool: WorkerPool, precision: str, schedule: str
) -> None:
    """A chain in one micro-batch adds nothing up in another order."""
    training = replace(training_of(FIXED_MODELS["chain"], precision), num_steps=5)
    plan = random_plan(captured_graph(training), num_devices=2, seed=1)
    one, ranks = both(pool, training, 2, num_microbatches=1, schedule=schedule, plan=plan)
    assert ranks[0].losses == one.losses
    for name, weight in one.weights.items():
        assert torch.equal(ranks[0].weights[name], weight), name


# One loss scale ----------------------------------------------------------------------------------


class Scales(lp.Callback):
    """Notes the loss scale after every batch, and whether weights of this rank changed in it."""

    def __init__(self) -> None:
        self.record: dict[str, Any] = {"scales": [], "is_skipped": []}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.before = [p.detach().clone() for p in pl_module.parameters()]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.record["scales"].append(loss_scale(trainer.precision_plugin))
        held = [(a, b) for a, b in zip(self.before, pl_module.parameters()) if not b.is_meta]
        is_same = all(not a.is_meta and torch.equal(a.to(b), b) for a, b in held)
        self.record["is_skipped"].append(is_same)


def noting_scales() -> list[lp.Callback]:
    return [Scales()]


@pytest.mark.parametrize(("schedule", "num_microbatches"), [("gpipe", 1), ("1f1b", 1), ("1f1b", 2)])
def test_steps_are_skipped_on_all_ranks_or_on_none(
    pool: WorkerPool, schedule: str, num_microbatches: int
) -> None:
    """The scale doubles after every step until a gradient is too large for float16.

    Those of micro-batches are smaller, so that it may get larger than on one device.
    """
    growing = options("16-mixed", init_scale=2.0**13, growth_interval=1)
    training = training_of(
        FIXED_MODELS["two_towers"], "16-mixed", trainer=growing, callbacks=noting_scales
    )
    plan = random_plan(captured_graph(training), num_devices=3, seed=0)
    strategy = {"num_microbatches": num_microbatches, "schedule": schedule, "plan": plan}
    one, ranks = both(pool, training, 3, **strategy)
    expected = one.extra if num_microbatches == 1 else ranks[0].extra
    assert True in expected["is_skipped"][1:] and False in expected["is_skipped"][1:]
    for rank in ranks:
        assert rank.extra["scales"] == expected["scales"]
        # The first batch is when ranks get their weights.
        assert rank.extra["is_skipped"][1:] == expected["is_skipped"][1:]


def summed(number: Tensor) -> Tensor:
    dist.all_reduce(number)
    return number


def scaled_step(fused: bool, rank_with_infinity: int) -> tuple[float, bool, bool]:
    """As one of two ranks: the scale after a step, whether this and the next step were made."""
    dist.init_process_group("gloo", "env://")
    rank = dist.get_rank()
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight], lr=0.1, fused=fused)
    if rank == 2:
        optimizer.param_groups[0]["params"] = []
    scaler = AgreedScaler.like(GradScaler("cpu", init_scale=4.0), torch.device("cpu"), summed)
    made = []
    for gradient in (float("inf") if rank == rank_with_infinity else 4.0, 4.0):
        before = weight.detach().clone()
        scaler.scale(torch.ones(()))
        if rank < 2:
            weight.grad = torch.full((2,), gradient)
        scaler.step(optimizer)
        scaler.update()
        made.append(not torch.equal(before, weight))
    dist.destroy_process_group()
    return scaler.get_scale(), made[0], made[1]


@pytest.mark.parametrize("is_fused", [False, True])
def test_an_infinity_of_one_rank_is_everybodys(pool: WorkerPool, is_fused: bool) -> None:
    """Fused optimizers look for infinities by themselves; the third rank has no parameters."""
    found = pool.run(scaled_step, is_fused, 1, num_ranks=3)
    assert found == [(2.0, False, True), (2.0, False, True), (2.0, False, False)]


def test_the_scale_is_kept_in_checkpoints_as_by_one_device(
    pool: WorkerPool, tmp_path: Path
) -> None:
    path = str(tmp_path / "half.ckpt")
    growing = options("16-mixed", init_scale=2.0**5, growth_interval=2)
    half = training_of(FIXED_MODELS["chain"], "16-mixed", trainer=growing, save_as=path)
    half = replace(half, num_steps=4)
    train_pipeline(pool, half, num_ranks=2, num_microbatches=2)
    state = torch.load(path, weights_only=True)["MixedPrecision"]
    assert state["scale"] == 2.0**7

    rest = replace(half, num_steps=6, checkpoint=path, save_as=None, callbacks=noting_scales)
    one, ranks = both(pool, rest, 2, num_microbatches=2)
    for result in (one, *ranks):
        assert result.extra["scales"] == [2.0**7, 2.0**8]


class _Strategy:
    clips_alone = False

    def total(self, number: Tensor) -> Tensor:
        return number

    def counted_parameters(self) -> None:
        return None

    def after_backward(self) -> None:
        """Nothing."""


class TransformerEnginePrecision(Precision):
    """Stands for Lightning's, which needs a package for GPUs."""


def test_others_are_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match=r"TransformerEnginePrecision.*'bf16-mixed'"):
        pipeline_precision(TransformerEnginePrecision(), _Strategy())


# Messages ----------------------------------------------------------------------------------------


class Messages(lp.Callback):
    """Notes the bytes of activations that this rank sends, and what was predicted."""

    def __init__(self) -> None:
        self.record: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self.records: list[ActionRecord] = []
        self._heard = heard(self.records.append)
        self._heard.__enter__()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._heard.__exit__(None, None, None)
        built, rank = trainer.strategy.session.run.built, trainer.global_rank
        for direction in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
            sends = [r for r in self.records if r.action.kind is direction and r.action.stage != -1]
            self.record[f"{direction.name} of {rank}"] = [r.size_bytes for r in sends]
        (edge,) = (e for e in built.placed.stages.edges if e.source == 0)
        specs = [t for name in edge.values for t in built.captured.graph.values[name].tensors]
        self.record["predicted"] = sum(spec.size_bytes for spec in specs)
        self.record["dtypes"] = {spec.dtype for spec in specs}


def noting_messages() -> list[lp.Callback]:
    return [Messages()]


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-mixed", "bfloat16"), ("16-mixed", "float16")]
)
def test_messages_have_the_precision_of_the_computation(
    pool: WorkerPool, precision: str, dtype: str
) -> None:
    training = training_of(FIXED_MODELS["chain"], precision, callbacks=noting_messages)
    training = replace(training, num_steps=1)  # 8 samples in 2 micro-batches
    plan = [
        ["entries", "node_1", "node_2", "node_3", "node_4"],
        ["node_5", "node_6", "node_7", "heads"],
    ]
    ranks = train_pipeline(pool, training, num_ranks=2, num_microbatches=2, plan=plan)
    found = ranks[0].extra | ranks[1].extra
    assert found["dtypes"] == {dtype}
    assert found["predicted"] == 4 * 6 * 2
    sent = [
        found[f"{way} of {rank}"] for rank in (0, 1) for way in ("SEND_FORWARD", "SEND_BACKWARD")
    ]
    assert sorted(filter(None, sent)) == [[found["predicted"]] * 2] * 2


# Clipping ----------------------------------------------------------------------------------------
