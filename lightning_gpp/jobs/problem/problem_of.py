"""What the planning jobs plan: a published workload, a graph file, or a recipe's module."""

from __future__ import annotations

from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from lightning_gpp.cluster import Cluster
from lightning_gpp.cluster.this_machine import CPU
from lightning_gpp.jobs.options import as_mapping, as_text
from lightning_gpp.jobs.problem.full_graph_problem import (
    FullGraphProblem,
    full_graph_planner,
    is_full_graph,
    workload_in_ways,
)
from lightning_gpp.jobs.problem.problem import (
    PlanningProblem,
    per_update_of,
    policy_of,
    with_policy,
)
from lightning_gpp.jobs.problem.workload_problem import workload_of, workload_problem
from lightning_gpp.workloads import WORKLOADS, FullGraphWorkload, Workload


def problem_of(config: DictConfig, folder: Path) -> PlanningProblem:
    """The problem of a configuration: that of ``graph``, or of the recipe's module.

    With the versions of weights that its policy holds, where its schedule does not drain.

    Args:
        config: of the run.
        folder: where the graph and the costs of a recipe's module are kept.

    Raises:
        ValueError: a file is missing or broken, a name is unknown, or the numbers make no sense.
    """
    # Says what is wrong before a recipe is captured.
    policy, per_update = policy_of(config), per_update_of(config)
    if policy is not None and (why := policy.why_not(per_update, most_ahead=0)):
        raise ValueError(why)
    one_graph = full_graph_problem_of(config, folder)
    if one_graph is not None:
        return one_graph.planned(full_graph_planner(config))
    return with_policy(problem_without_policy(config, folder), policy, per_update)


def full_graph_problem_of(config: DictConfig, folder: Path) -> FullGraphProblem | None:
    """The problem of a model on one graph; None where it is none.

    Args:
        config: of the run.
        folder: as in :func:`problem_of`.

    Raises:
        ValueError: likewise.
    """
    cluster = cluster_of(config)
    if config.graph in WORKLOADS:
        workload = _workload_of(config)
        if isinstance(workload, FullGraphWorkload):
            return workload_in_ways(workload, cluster, config)
        return None
    if config.graph is None and is_full_graph(config):
        # Imports torch and Lightning, which graphs of files do not need.
        from lightning_gpp.jobs.problem.full_graph_recipe import recipe_in_ways

        return recipe_in_ways(config, cluster, folder)
    return None


def problem_without_policy(config: DictConfig, folder: Path) -> PlanningProblem:
    """:func:`problem_of` with one version of the weights, whatever the policy.

    Args:
        config: of the run.
        folder: where the graph and the costs of a recipe's module are kept.

    Raises:
        ValueError: a file is missing or broken, a name is unknown, or the numbers make no sense.
    """
    cluster = cluster_of(config)
    if config.graph is None:
        # Imports torch and Lightning, which graphs of files do not need.
        from lightning_gpp.jobs.problem.recipe_problem import recipe_problem

        return recipe_problem(config, cluster, folder)
    return workload_problem(_workload_of(config), cluster, config)


def cluster_of(config: DictConfig) -> Cluster:
    """The devices to plan for: for a recipe on this machine, as many as training would start."""
    ranks = OmegaConf.select(config, "trainer.devices")
    is_open = config.cluster.get("name") == CPU and config.cluster.num_devices is None
    trains = config.graph is None and isinstance(ranks, int) and ranks > 0
    options = {"num_devices": ranks} if is_open and trains else {}
    cluster: Cluster = instantiate(config.cluster, **options)
    return cluster


def _workload_of(config: DictConfig) -> Workload:
    graph = as_text("graph", config.graph) or ""
    return workload_of(graph, options=as_mapping("graph_options", config.graph_options))
