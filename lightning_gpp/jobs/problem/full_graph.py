"""The problem of a model on one graph: into how many ways its vertices are divided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from lightning_gpp.cluster import Cluster
from lightning_gpp.cost import roofline_costs
from lightning_gpp.jobs.problem.problem import (
    Divided,
    PlanningProblem,
    chosen_planner,
    cluster_of,
    strategy_option,
)
from lightning_gpp.jobs.problem.workload import workload_of
from lightning_gpp.planner import BALANCED, plan_request
from lightning_gpp.planner.ways import WaysAnswer, answer_ways
from lightning_gpp.schedule import GPIPE_REVERSED
from lightning_gpp.workloads import FullGraphWorkload, full_graph

CHUNKS_PER_DEVICE = 4
"""Of GNNPipe's experiments (arXiv 2308.10087)."""


@dataclass(frozen=True, slots=True)
class FullGraphProblem:
    """A model on one graph, planned for every number of ways that is asked for.

    Attributes:
        name: of the model.
        source: where the graph and the costs come from.
        cluster: the devices.
        answers: the plan for every number of ways.
    """

    name: str
    source: str
    cluster: Cluster
    answers: Sequence[WaysAnswer]

    def planned(self) -> PlanningProblem:
        """The question for the best number of ways, with its answer."""
        best = min(self.answers, key=lambda found: found.evaluation.step_s)
        request, notes = best.request, best.notes
        if len(self.answers) > 1:
            others = ", ".join(str(each.model.num_ways) for each in self.answers)
            notes += (
                f"ways={best.model.num_ways} is the best of {others}; job=compare shows them all.",
            )
        return PlanningProblem(
            self.name, self.source, request, GPIPE_REVERSED.name, notes, plan=best.plan
        )


def full_graph_of(config: DictConfig, folder: Path) -> FullGraphProblem | None:
    """The problem of a model on one graph; None where it is none.

    Args:
        config: of the run.
        folder: where the graph and the costs of a recipe's module are kept.

    Raises:
        ValueError: an option of models on one graph is given for another one.
    """
    strategy = config.get("strategy", "")
    target = strategy if isinstance(strategy, str) else str(strategy.get("_target_", ""))
    trains_on_one = target == "gnnpipe" or target.endswith("GNNPipeStrategy")
    if config.graph != full_graph.__name__ and (config.graph is not None or not trains_on_one):
        for given, option in ((trains_on_one, "strategy=gnnpipe"), (config.get("ways"), "ways")):
            if given:
                what = "this recipe's strategy" if config.graph is None else f"graph={config.graph}"
                raise ValueError(
                    f"{option} is for models on one graph, which {what} is not: leave it out, or "
                    "give graph=full_graph, or strategy=gnnpipe with a recipe"
                )
        return None
    cluster = cluster_of(config)
    if config.graph is None:
        # Imports torch and Lightning, which graphs of files do not need.
        from lightning_gpp.jobs.problem.full_graph_recipe import recipe_divided

        name, source, num_vertices, divide = recipe_divided(config, cluster, folder)
    else:
        workload = workload_of(config)
        assert isinstance(workload, FullGraphWorkload)
        name, source, num_vertices = workload.name, workload.source, workload.samples_per_device
        divide = partial(_divided, workload, cluster)
    num_devices = cluster.num_devices
    exact = strategy_option(config, "mode") == "exact"

    def answered(ways: int) -> WaysAnswer:
        if num_devices % ways:
            raise ValueError(f"ways={ways} has to divide the {num_devices} devices")
        chunks = strategy_option(config, "chunks")
        chunks = chunks or max(1, CHUNKS_PER_DEVICE * num_devices // ways)
        if exact or ways == num_devices:  # graph parallelism alone: layers see all vertices
            chunks = 1
        model, costs, notes = divide(ways, chunks)
        request = plan_request(
            model.graph,
            cluster,
            minibatch_size=num_vertices,
            costs=costs,
            num_microbatches=chunks,
            schedule=GPIPE_REVERSED.name,
            max_replicas=1,
        )
        return answer_ways(request, model, planner, notes)

    divisors = [ways for ways in range(1, num_devices + 1) if num_devices % ways == 0]
    planner = chosen_planner(config, BALANCED)
    answers = [answered(ways) for ways in ([config.ways] if config.ways else divisors)]
    return FullGraphProblem(name, source, cluster, answers)


def _divided(workload: FullGraphWorkload, cluster: Cluster, ways: int, chunks: int) -> Divided:
    """A network that is known by the statistics of its graph."""
    model, works = workload.in_ways(ways, chunks)
    kinds = [cluster.device_kind(name) for name in cluster.kinds]
    most = float(workload.samples_per_device)
    return model, roofline_costs(works, kinds, sorted({most / chunks / 2, most / chunks, most})), ()
