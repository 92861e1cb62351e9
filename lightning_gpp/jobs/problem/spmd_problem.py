"""A recipe's module as ATen operators, for SPMD programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np
import torch
from omegaconf import DictConfig

from lightning_gpp.cluster import Cluster
from lightning_gpp.cluster.this_machine import CPU
from lightning_gpp.jobs.problem.recipe_problem import threads_of_one_of, until_first_call
from lightning_gpp.planner import PlanRequest
from lightning_gpp.spmd.costs.machine import AlphaBeta, CollectiveTimes, DeviceSpeeds, Machine
from lightning_gpp.spmd.costs.prices import PriceList
from lightning_gpp.spmd.operator_graph import SpmdGraph
from lightning_gpp.spmd.rules.theory import Theory
from lightning_gpp.spmd.run.export import export_forward
from lightning_gpp.strategy.cutting.microbatches import resized_batch, size_or_none
from lightning_gpp.strategy.spmd.planners import machine_of, measure_speeds


class SpmdProblem(NamedTuple):
    """A model and devices, for SPMD programs.

    Attributes:
        graph: the model, for the samples of one mini-batch.
        machine: the devices; on one of a kind the model takes as long as its measured operators.
        factors: by kind of device, what its speeds were divided by for that.
    """

    graph: SpmdGraph
    machine: Machine
    factors: Mapping[str, float]


def spmd_problem(config: DictConfig, request: PlanRequest) -> SpmdProblem:
    """The same question as pipelines are asked.

    A model of SPMD programs is priced by flops and bytes, one of pipelines by operators that were
    measured. So that both can stand in one table, the speeds of every kind of device are scaled by
    one number: alone, it takes as long for the model as the measured operators do together.

    Args:
        config: of a recipe.
        request: the question to planners of pipelines.

    Raises:
        ExportError: the forward cannot be captured as operators of torch.
        ValueError: nothing is known of how fast a kind of device computes, or the batch cannot be
            made as large as asked for.
    """
    size = request.minibatch_size
    graph: SpmdGraph = until_first_call(
        config,
        lambda target, args, kwargs: export_forward(target, args, kwargs).graph,
        lambda batch: batch if size == size_or_none(batch) else resized_batch(batch, size),
    )
    machine = replace(_machine(request.cluster), optimizer_tensors=1 + request.optimizer_values)
    factors = {kind: _factor(kind, graph, machine, request) for kind in request.cluster.kinds}
    each = np.array([factors[device.kind] for device in request.cluster.devices])
    speeds = machine.speeds
    scaled = replace(
        speeds,
        flops_per_s=speeds.flops_per_s / each,
        memory_bytes_per_s=speeds.memory_bytes_per_s / each,
        launch_s=speeds.launch_s * each,
    )
    return SpmdProblem(graph, replace(machine, speeds=scaled), factors)


def _machine(cluster: Cluster) -> Machine:
    """The devices, processes of this machine by what it can do."""
    if cluster.kinds != (CPU,):
        return machine_of(cluster, None)
    with threads_of_one_of(cluster):
        speeds = measure_speeds(torch.device(CPU))
    each = (np.repeat(getattr(speeds, of.name), cluster.num_devices) for of in fields(speeds))
    return machine_of(cluster, DeviceSpeeds(*each))


def _factor(kind: str, graph: SpmdGraph, machine: Machine, request: PlanRequest) -> float:
    """How much longer a device of a kind takes for the model than its speeds say."""
    place = next(i for i, device in enumerate(request.cluster.devices) if device.kind == kind)
    speeds = machine.speeds
    one = DeviceSpeeds(*(getattr(speeds, each.name)[[place]] for each in fields(speeds)))
    alone = replace(
        machine,
        speeds=one,
        times=CollectiveTimes(*(AlphaBeta(),) * 7),
        memory_bytes=np.array([np.inf]),
    )
    prices = PriceList(graph, alone, (1.0,))
    theory = Theory(graph, 1)
    said_s = sum(prices.computation(op, theory.rules(op)[0]).seconds for op in graph.operators)
    profile = request.costs.at(request.minibatch_size, kind)
    measured_s = sum(cost.forward_s + cost.backward_s for cost in profile.operators.values())
    return measured_s / said_s
