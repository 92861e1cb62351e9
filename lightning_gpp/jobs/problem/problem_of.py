"""What the planning jobs plan: a published workload, a graph file, or a recipe's module."""

from __future__ import annotations

from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig

from lightning_gpp.cluster import Cluster
from lightning_gpp.jobs.options import as_mapping, as_text
from lightning_gpp.jobs.problem.problem import PlanningProblem, policy_of, with_policy
from lightning_gpp.jobs.problem.workload_problem import workload_of, workload_problem


def problem_of(config: DictConfig, folder: Path) -> PlanningProblem:
    """The problem of a configuration: that of ``graph``, or of the recipe's module.

    With the versions of weights that its policy holds, where its schedule does not drain.

    Args:
        config: of the run.
        folder: where the graph and the costs of a recipe's module are kept.

    Raises:
        ValueError: a file is missing or broken, a name is unknown, or the numbers make no sense.
    """
    policy = policy_of(config)  # says what is wrong before a recipe is captured
    return with_policy(problem_without_policy(config, folder), policy)


def problem_without_policy(config: DictConfig, folder: Path) -> PlanningProblem:
    """:func:`problem_of` with one version of the weights, whatever the policy.

    Args:
        config: of the run.
        folder: where the graph and the costs of a recipe's module are kept.

    Raises:
        ValueError: a file is missing or broken, a name is unknown, or the numbers make no sense.
    """
    cluster: Cluster = instantiate(config.cluster)
    if config.graph is None:
        # Imports torch and Lightning, which graphs of files do not need.
        from lightning_gpp.jobs.problem.recipe_problem import recipe_problem

        return recipe_problem(config, cluster, folder)
    graph = as_text("graph", config.graph) or ""
    workload = workload_of(graph, options=as_mapping("graph_options", config.graph_options))
    return workload_problem(workload, cluster, config)
