"""A recipe's module on one graph: captured, divided and measured for a number of ways."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from omegaconf import DictConfig

from lightning_gpp.cluster import Cluster
from lightning_gpp.gnn import ChunkedModel, Techniques, chunk_costs, partition
from lightning_gpp.jobs.files import save_graph
from lightning_gpp.jobs.problem.problem import Divided, strategy_option
from lightning_gpp.jobs.problem.recipe_problem import look_at, module_name, threads_of_one_of
from lightning_gpp.strategy.planning.example import the_graph


def recipe_divided(
    config: DictConfig, cluster: Cluster, folder: Path
) -> tuple[str, str, int, Callable[[int, int], Divided]]:
    """Name, source and vertices of a recipe's model, and what divides and measures it.

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

    def divide(ways: int, chunks: int) -> Divided:
        divided = partition(edges, num_vertices, chunks, seed % 2**31, ways)
        captured.take_graph(graph, as_captured)
        model = ChunkedModel(captured, tensors, divided, Techniques(), flags, call.example)
        captured.take_graph(model.graph, model.in_ways.operators)
        with threads_of_one_of(cluster):
            costs = chunk_costs(model, tensors)
        save_graph(model.graph, costs, folder)
        return model.in_ways, costs, (divided.describe(),)

    source = (
        f"{config.recipe.module._target_} on {num_vertices} vertices and {edges.shape[1]} edges, "
        "captured and measured on this machine, chunk by chunk"
    )
    return module_name(config), source, num_vertices, divide
