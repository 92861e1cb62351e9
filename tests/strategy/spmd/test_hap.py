"""``Trainer(strategy="hap")`` trains as one device does: weights, losses, logs, metrics."""

from __future__ import annotations

from functools import partial

import lightning.pytorch as lp
import numpy as np
import pytest
from helpers.families import EncoderTower, Family, FamilyData
from helpers.models import FIXED_MODELS, DataSpec
from helpers.random_models import BranchyModel, OptimizerSpec
from helpers.random_programs import DrawsPrograms
from helpers.reference import assert_equal_training
from helpers.training import Training, make_trainer, quiet
from helpers.workers import WorkerPool

from lightning_gpp.cluster import Link, uniform_cluster
from lightning_gpp.spmd.costs.machine import Machine, collective_times, measured_speeds
from lightning_gpp.spmd.program import Computation
from lightning_gpp.spmd.run.export import export_forward
from lightning_gpp.strategy.spmd.planners import HapPlanner

HAP = {"kind": "HAPStrategy"}
UNEVEN = {1: None, 2: [0.7, 0.3], 3: [0.5, 0.2, 0.3]}


def branchy(
    model: str = "two_towers", optimizer: OptimizerSpec | None = None, **options: object
) -> Training:
    """10 steps; 29 samples in batches of 8: every fourth batch has five samples."""
    spec = FIXED_MODELS[model]
    return Training(
        partial(BranchyModel, spec, optimizer or OptimizerSpec()),
        DataSpec(num_inputs=spec.num_inputs),
        num_steps=10,
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_by_samples(pool: WorkerPool, num_ranks: int) -> None:
    assert_equal_training(
        pool,
        branchy(),
        num_ranks=num_ranks,
        shares=UNEVEN[num_ranks],
        planner="data_parallel",
        **HAP,
    )


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # one device uses them
def test_padding_in_validation(pool: WorkerPool) -> None:
    data = FamilyData(num_samples=18, inputs=("sequence", "padding"))
    training = Training(partial(Family, EncoderTower), data, num_steps=3)
    assert_equal_training(pool, training, num_ranks=2, planner="data_parallel", **HAP)


def slow_devices() -> Machine:
    """Two devices so slow, one of them half as fast, that dividing pays."""
    cluster = uniform_cluster(2, Link(1e12))
    return Machine(measured_speeds([2e6, 1e6]), collective_times(cluster), np.full(2, np.inf))


@pytest.mark.parametrize("shares", [None, [0.7, 0.3]], ids=["found", "given"])
def test_as_planned(pool: WorkerPool, shares: list[float] | None) -> None:
    planner = HapPlanner(slow_devices(), has_shares=shares is not None)
    training = branchy()
    exported = export_forward(training.module(), *training.example_arguments(8))
    program = planner(exported.graph, shares or [0.5, 0.5], None)
    computed = [i for i in program.instructions if isinstance(i, Computation)]
    assert any(p.is_shard for each in computed for p in each.outputs)
    assert_equal_training(pool, training, num_ranks=2, shares=shares, planner=planner, **HAP)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("optimizer", "trainer"),
    [
        (OptimizerSpec("adamw", num_groups=3), {"gradient_clip_val": 0.1}),
        (OptimizerSpec("sgd"), {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}),
        (OptimizerSpec("adamw", scheduler="step"), {"accumulate_grad_batches": 2}),
        (OptimizerSpec("sgd", scheduler="plateau"), {}),
    ],
    ids=["norm", "value", "accumulation", "plateau"],
)
def test_clipping_accumulation_and_schedulers(
    pool: WorkerPool, optimizer: OptimizerSpec, trainer: dict[str, object]
) -> None:
    training = branchy("diamond", optimizer, trainer=trainer)
    assert_equal_training(
        pool, training, num_ranks=3, shares=UNEVEN[3], planner=DrawsPrograms(5), **HAP
    )


def test_parts_of_parameters_and_of_their_state_are_held(pool: WorkerPool) -> None:
    """What the program divides is nowhere whole, and its optimizer state neither."""
    results = pool.run(held_sizes, DrawsPrograms(0), num_ranks=2)
    whole, *parts = (sizes["whole"] for sizes in results), *(s["parts"] for s in results)
    total = next(whole)
    assert any(0 < part[name] < total[name] for part in parts for name in total)
    for name, size in total.items():
        held = [part[name] for part in parts]
        assert sum(held) == size or held == [size] * 2, name
    for sizes in results:
        assert sizes["state"] == sizes["parts"]


def held_sizes(planner: DrawsPrograms) -> dict[str, dict[str, int]]:
    """Elements of every parameter, whole and on this rank, and of its momentum."""
    training = branchy()
    found: dict[str, dict[str, int]] = {}

    class Looks(lp.Callback):
        def on_train_batch_end(self, trainer, module, *_: object) -> None:
            partition = trainer.strategy.session.run.partition
            (optimizer,) = trainer.optimizers
            names = {id(p): name for name, p in partition.named_parameters()}
            parts = dict(partition.named_parameters())
            found["parts"] = {name: p.numel() for name, p in parts.items()}
            found["state"] = {
                names[id(p)]: state["momentum_buffer"].numel()
                for p, state in optimizer.state.items()
            }

    module = training.module()
    found["whole"] = {name: p.numel() for name, p in module.named_parameters()}
    strategy = {"planner": planner, "shares": UNEVEN[2], "timeout": 100.0, **HAP}
    with quiet():
        trainer = make_trainer(strategy, 2, max_steps=2, callbacks=[Looks()])
        trainer.fit(module, training.data.loader())
    return found
