"""Models of the transformers library train as pipelines to the weights of one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from helpers import transformer_models as models
from helpers.jobs import lines_of_fit
from helpers.plans import random_plan
from helpers.reference import assert_equal_training
from helpers.training import Training
from helpers.transformer_backbones import (
    BACKBONES,
    OF_THE_WHOLE_BATCH,
    ONLY_FLOAT32,
    Backbone,
    BackboneData,
)
from helpers.workers import WorkerPool

from lightning_gpp.capture import capture
from lightning_gpp.graph import FEED, ModelGraph, Variation, stage_graph
from lightning_gpp.planner import Plan

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed"
)

TEXT = ("input_ids", "attention_mask")
FAMILIES: dict[str, tuple[Callable[[], Any], str, tuple[str, ...]]] = {
    "bert": (models.bert, "sgd", (*TEXT, "labels")),
    "gpt2": (models.gpt2, "adamw", (*TEXT, "token_labels")),
    "llama": (models.llama, "adamw", (*TEXT, "token_labels")),
    "t5": (models.t5, "adamw", (*TEXT, "token_labels")),
    "vit": (models.vit, "adamw", ("pixel_values", "labels")),
    "clip": (models.clip, "adamw", (*TEXT, "pixel_values")),
}
OWN_LOSS = {"bert", "t5", "vit"}
"""Pipelined as ``module="model"``, with the loss of the library.

That of GPT-2 and Llama is taken in float32, so that its value is equal to 1e-7 only.
"""


def training_of(name: str) -> Training:
    build, optimizer, fields = FAMILIES[name]
    kind = models.OwnLoss if name in OWN_LOSS else models.Logits
    kind = models.PairScores if name == "clip" else kind
    data = models.TransformerData(num_samples=18, fields=fields)
    return Training(partial(kind, build, optimizer), data, num_steps=5, validate=False)


@pytest.mark.parametrize("index", range(len(FAMILIES)), ids=FAMILIES)
def test_a_family_trains_as_on_one_device(pool: WorkerPool, index: int) -> None:
    name = list(FAMILIES)[index]
    chosen = {"module": "model"} if name in OWN_LOSS else {}
    assert_equal_training(
        pool,
        training_of(name),
        num_ranks=2 + index % 3,
        num_microbatches=4,
        schedule=("gpipe", "1f1b")[index % 2],
        **chosen,
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_micro_batches_of_one_sample_without_a_mask(pool: WorkerPool, name: str) -> None:
    """The library tells one sequence from several where positions are the same for all."""
    build, optimizer, _ = FAMILIES[name]
    data = models.TransformerData(num_samples=18, fields=("input_ids", "token_labels"))
    training = Training(partial(models.Logits, build, optimizer), data, num_steps=4, validate=False)
    assert_equal_training(pool, training, num_ranks=2, num_microbatches=data.batch_size)


def random(graph: ModelGraph, seed: int) -> Plan:
    return random_plan(graph, num_devices=3, seed=seed, with_replicas=True)


def shares(plan: Plan, graph: ModelGraph) -> bool:
    """Whether something that is not of single samples goes to replicas that split the samples."""
    stages = stage_graph(graph, plan.stage_operators)
    return any(
        plan.stages[edge.target].num_replicas > 1
        and max(plan.stages[edge.source].replica_multiples)
        > max(plan.stages[edge.target].replica_multiples)
        and any(graph.values[name].variation is not Variation.SAMPLES for name in edge.values)
        for edge in stages.edges
        if edge.source != FEED
    )


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("name", ["bert", "llama", "vit"])
def test_replicas_share_what_depends_on_no_samples(pool: WorkerPool, name: str) -> None:
    """Positions, masks and sizes cross between stages that take other numbers of samples."""
    build, optimizer, fields = FAMILIES[name]
    data = models.TransformerData(num_samples=20, fields=fields)
    training = Training(partial(models.Logits, build, optimizer), data, num_steps=5, validate=False)
    batch = next(iter(data.loader()))
    inputs = {key: value[:2] for key, value in batch.items() if "labels" not in key}
    graph = capture(training.module(), (), inputs).graph
    plan = next(plan for seed in range(99) if shares((plan := random(graph, seed)), graph))
    assert_equal_training(pool, training, num_ranks=3, plan=plan)


def test_a_contrast_within_the_batch_runs_in_one_piece(pool: WorkerPool) -> None:
    """It is made in forward, with the loss of the library; in the step it would be cut."""
    data = models.TransformerData(num_samples=18, fields=FAMILIES["clip"][2])
    training = Training(
        partial(models.Contrast, models.clip, "adamw"), data, num_steps=4, validate=False
    )
    strategy = {"num_microbatches": 2, "module": "model"}
    assert_equal_training(pool, training, num_ranks=2, **strategy)
    lines, _ = pool.run(lines_of_fit, training, strategy, 2, num_ranks=2)
    assert len([line for line in lines if "in one piece, as" in line]) == 1


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", BACKBONES)
def test_a_bare_backbone_called_by_keywords_trains_as_on_one_device(
    pool: WorkerPool, kind: str
) -> None:
    """Several decorate their forward, and tell keywords from positions."""
    dtype = "float32" if kind in ONLY_FLOAT32 else "float64"
    data = BackboneData(kind=kind, num_samples=11, batch_size=6, dtype=dtype)
    training = Training(partial(Backbone, kind), data, num_steps=2, validate=False)
    num_microbatches = 1 if kind in OF_THE_WHOLE_BATCH else 3
    strategy = {"module": "backbone", "num_microbatches": num_microbatches}
    assert_equal_training(pool, training, num_ranks=2, **strategy)


def test_the_backbones_of_the_docs_are_those_that_are_tried() -> None:
    text = Path(__file__).parents[2].joinpath("docs/your_code.md").read_text(encoding="utf-8")
    rows = text[text.index("| encoders |") :].partition("\n\n")[0].splitlines()
    assert ", ".join(row.split("|")[2].strip() for row in rows) == ", ".join(BACKBONES)
