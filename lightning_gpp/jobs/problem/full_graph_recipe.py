"""A recipe's module on one graph: captured, divided and measured for a number of ways."""

from __future__ import annotations

from pathlib import Path

import torch
from omegaconf import DictConfig

from lightning_gpp.cluster import Cluster
from lightning_gpp.gnn import ChunkedModel, Techniques, chunk_costs, partition
from lightning_gpp.jobs.files import save_graph
from lightning_gpp.jobs.problem.full_graph_problem import FullGraphProblem
from lightning_gpp.jobs.problem.problem import strategy_option
from lightning_gpp.jobs.problem.recipe_problem import look_at, module_name, threads_of_one_of
from lightning_gpp.planner import plan_request
from lightning_gpp.planner.ways.answers import WaysQuestion
from lightning_gpp.schedule import GPIPE_REVERSED
from lightning_gpp.strategy.planning.full_graph import the_graph


def recipe_in_ways(config: DictConfig, cluster: Cluster, folder: Path) -> FullGraphProblem:
    """Captures a recipe's module with its graph; divides and measures it when that is asked for.

    Raises:
        GraphTrainingError: it is not called with one graph.
        CaptureError: the module cannot be captured.
    """
    look = look_at(config, None)
    captured, call = look.captured, look.call
    assert captured is not None and call is not None
    tensors = call.tensors
    edges, num_vertices = the_graph(tensors)
    graph = captured.graph
    as_captured = {operator.name: (operator.name, 0) for operator in graph}
    flags = {name: module.training for name, module in captured.module.named_modules()}
    seed = strategy_option(config, "seed")
    seed = torch.initial_seed() if seed is None else int(seed)

    def question(ways: int, chunks: int) -> WaysQuestion:
        divided = partition(edges, num_vertices, chunks, seed % 2**31, ways)
        captured.take_graph(graph, as_captured)
        model = ChunkedModel(captured, tensors, divided, Techniques(), flags, call.example)
        captured.take_graph(model.graph, model.in_ways.operators)
        with threads_of_one_of(cluster):
            costs = chunk_costs(model, tensors)
        save_graph(model.graph, costs, folder)
        request = plan_request(
            model.graph,
            cluster,
            minibatch_size=num_vertices,
            costs=costs,
            num_microbatches=chunks,
            schedule=GPIPE_REVERSED.name,
            max_replicas=1,
        )
        return WaysQuestion(request, model.in_ways, (divided.describe(),))

    chunks = 1 if strategy_option(config, "mode") == "exact" else strategy_option(config, "chunks")
    source = (
        f"{config.recipe.module._target_} on {num_vertices} vertices and {edges.shape[1]} edges, "
        "captured and measured on this machine, chunk by chunk"
    )
    return FullGraphProblem(module_name(config), source, cluster, question, chunks, config.ways)
