"""What the planning jobs plan: a published workload, a graph file, or a recipe's module."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from lightning_gpp.cluster import Cluster
from lightning_gpp.common.checks import check_whole
from lightning_gpp.cost import Costs, load_costs
from lightning_gpp.jobs.options import as_flag, as_text
from lightning_gpp.jobs.problem.full_graph import full_graph_of
from lightning_gpp.jobs.problem.problem import (
    PlanningProblem,
    cluster_of,
    per_update_of,
    policy_of,
    refitted,
    schedule_of,
    with_policy,
)
from lightning_gpp.jobs.problem.workload import workload_of
from lightning_gpp.planner import plan_request
from lightning_gpp.workloads import Workload


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
    one_graph = full_graph_of(config, folder)
    if one_graph is not None:
        return one_graph.planned()
    return with_policy(problem_without_policy(config, folder), policy, per_update)


def problem_without_policy(config: DictConfig, folder: Path) -> PlanningProblem:
    """:func:`problem_of` with one version of the weights, whatever the policy."""
    cluster = cluster_of(config)
    if config.graph is not None:
        return workload_problem(workload_of(config), cluster, config)
    # Imports torch and Lightning, which graphs of files do not need.
    from lightning_gpp.jobs.problem.recipe_problem import recipe_problem

    return recipe_problem(config, cluster, folder)


def workload_problem(workload: Workload, cluster: Cluster, config: DictConfig) -> PlanningProblem:
    """The problem of a workload, with the options of a configuration."""
    size = config.minibatch_size
    size = workload.minibatch_size(cluster.num_devices) if size is None else size
    check_whole("minibatch_size", size)
    path, refit, costs = as_text("costs", config.costs), None, None
    if path is not None:
        # Imports the simulator, which questions without a file of costs do not need.
        from lightning_gpp.simulate.refit.refit import is_refit_file, load_refit

        refit = load_refit(path) if is_refit_file(path) else None
        costs = load_costs(path) if refit is None else None
    if costs is None:
        costs = workload.costs_for(cluster, size)
    check_seconds(costs, source=path or workload.name)
    request = plan_request(
        workload.graph,
        cluster,
        minibatch_size=size,
        costs=costs,
        num_microbatches=config.num_microbatches,
        may_recompute=as_flag("recompute", config.recompute),
    )
    problem = PlanningProblem(workload.name, workload.source, request, schedule_of(config))
    return problem if refit is None else refitted(problem, refit)


def check_seconds(costs: Costs, *, source: str) -> None:
    """Refuses costs in which nothing takes time: rates would be infinite."""
    seconds = (cost.forward_s + cost.backward_s for cost in costs.profiles[0].operators.values())
    if not any(seconds):
        raise ValueError(
            f"{source}: no operator takes any time; expected seconds above 0 for at least one"
        )
