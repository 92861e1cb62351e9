"""Reads what a planning job plans: a published workload, a graph file, or a recipe's module.

Of a model on one graph the question is also into how many ways its vertices are divided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lightning_gpp.cluster import Cluster
from lightning_gpp.common.checks import check_whole
from lightning_gpp.common.data_file import read_text
from lightning_gpp.common.strict_json import parse_json
from lightning_gpp.common.units_of_measure import bytes_text, seconds_text
from lightning_gpp.cost import Costs, graph_work, roofline_costs
from lightning_gpp.graph.model_graph import graph_from_json
from lightning_gpp.jobs.options import as_flag, as_mapping, as_text
from lightning_gpp.jobs.problem.problem import (
    PlanningProblem,
    chosen_planner,
    cluster_of,
    per_update_of,
    policy_of,
    schedule_of,
    with_policy,
)
from lightning_gpp.planner import BALANCED, plan_request
from lightning_gpp.planner.plan_to_run import PlanQuestion
from lightning_gpp.planner.ways import WaysAnswer, answer_ways
from lightning_gpp.schedule import GPIPE_REVERSED
from lightning_gpp.workloads import (
    WORKLOADS,
    FullGraphWorkload,
    Workload,
    full_graph,
    read_pipedream_profile,
    read_piper_workload,
)

CHUNKS_PER_DEVICE = 4
"""Of GNNPipe's experiments (arXiv 2308.10087)."""


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
    if is_on_one_graph(config):
        return full_graph_problem(config)
    cluster = cluster_of(config)
    if config.graph is not None:
        problem = workload_problem(workload_of(config), cluster, config)
    else:
        # Imports torch and Lightning, which graphs of files do not need.
        from lightning_gpp.jobs.problem.recipe_problem import recipe_problem

        problem = recipe_problem(config, cluster, folder)
    return with_policy(problem, policy, per_update)


def workload_problem(workload: Workload, cluster: Cluster, config: DictConfig) -> PlanningProblem:
    """The problem of a workload, with the options of a configuration."""
    size = config.minibatch_size
    size = workload.minibatch_size(cluster.num_devices) if size is None else size
    check_whole("minibatch_size", size)
    path, given = as_text("costs", config.costs), None
    if path is not None:
        # Imports the simulator, which questions without a file of costs do not need.
        from lightning_gpp.simulate.refit import load_costs_or_refit

        given = load_costs_or_refit(path)
    costs = given if isinstance(given, Costs) else workload.costs_for(cluster, size)
    if not any(one.forward_s + one.backward_s for one in costs.profiles[0].operators.values()):
        raise ValueError(
            f"{path or workload.name}: no operator takes any time; expected seconds above 0 for at "
            "least one"
        )
    request = plan_request(
        workload.graph,
        cluster,
        minibatch_size=size,
        costs=costs,
        num_microbatches=config.num_microbatches,
        may_recompute=as_flag("recompute", config.recompute),
    )
    question = PlanQuestion(request, schedule=schedule_of(config))
    problem = PlanningProblem(workload.name, workload.source, question)
    return problem if given is None or isinstance(given, Costs) else problem.refitted(given)


# Workloads ---------------------------------------------------------------------------------------


def workload_of(config: DictConfig) -> Workload:
    """The workload that ``graph`` names, or of a file of any known form.

    Raises:
        ValueError: there is no such model or file, the file is broken, or an option is unknown.
    """
    graph = as_text("graph", config.graph) or ""
    return load_workload(graph, as_mapping("graph_options", config.graph_options))


def load_workload(graph: str, options: Mapping[str, Any] | None = None) -> Workload:
    """A workload by its name, or from a file of any known form.

    Args:
        graph: name in :data:`~lightning_gpp.workloads.WORKLOADS`; or a file: a PipeDream profile
            (``.txt``), an input of Piper, or a model graph of ours (both ``.json``).
        options: of the model or the reader.
    """
    reader = WORKLOADS.get(graph) or partial(_reader(graph), graph)
    taken = signature(reader).parameters.values()
    known = [option.name for option in taken if option.default is not Parameter.empty]
    if unknown := [str(name) for name in options or {} if name not in known]:
        raise ValueError(
            f"graph_options of {graph}: unknown option {unknown[0]!r}; expected "
            f"{', '.join(known) or 'none'}"
        )
    return reader(**(options or {}))


def _reader(graph: str) -> Callable[..., Workload]:
    path = Path(graph)
    if not path.is_file():
        raise ValueError(
            f"graph={graph} is neither a file nor a known model ({', '.join(WORKLOADS)}); expected "
            "a PipeDream profile (.txt), an input of Piper or a model graph (.json)"
        )
    if path.suffix != ".json":
        return read_pipedream_profile
    data = parse_json(read_text(path, "an input of Piper or a model graph (JSON)"), graph)
    is_ours = isinstance(data, Mapping) and "format" in data
    return read_graph_file if is_ours else read_piper_workload


def read_graph_file(path: str | Path) -> Workload:
    """A workload of a model graph in our own form; costs are estimated."""
    graph = graph_from_json(read_text(path, "a model graph (JSON)"), source=str(path))
    size = graph.microbatch_size
    return Workload(Path(path).stem, graph, graph_work(graph), size, source=str(path))


# Models on one graph -----------------------------------------------------------------------------


def is_on_one_graph(config: DictConfig) -> bool:
    """Whether the model is a network on one graph.

    Raises:
        ValueError: an option of models on one graph is given for another one, or for a recipe.
    """
    if config.graph == full_graph.__name__:
        return True
    strategy = config.get("strategy", "")
    target = strategy if isinstance(strategy, str) else str(strategy.get("_target_", ""))
    trains_on_one = target == "gnnpipe" or target.endswith("GNNPipeStrategy")
    for given, option in ((trains_on_one, "strategy=gnnpipe"), (config.get("ways"), "ways")):
        if given:
            what = "this recipe" if config.graph is None else f"graph={config.graph}"
            raise ValueError(
                f"{option} is for models on one graph, which {what} is not: leave it out, or give "
                "graph=full_graph with the numbers of the graph (recipes on one graph are planned "
                "when they train)"
            )
    return False


def full_graph_problem(config: DictConfig) -> PlanningProblem:
    """The question of a model on one graph for the best number of ways, with its answer."""
    cluster, workload = cluster_of(config), workload_of(config)
    assert isinstance(workload, FullGraphWorkload)
    num_devices = cluster.num_devices
    divisors = [ways for ways in range(1, num_devices + 1) if num_devices % ways == 0]
    asked = [config.ways] if config.ways else divisors
    answers = [_answer_ways(config, workload, cluster, ways) for ways in asked]
    best = min(answers, key=lambda found: found.evaluation.step_s)
    notes: tuple[str, ...] = ()
    if len(answers) > 1:
        each = (
            f"ways={one.model.num_ways} {seconds_text(one.evaluation.step_s)}, "
            f"{bytes_text(one.message_bytes)} of messages, "
            f"{bytes_text(one.evaluation.peak_memory_bytes)} at most on a device"
            for one in answers
        )
        notes = (f"An epoch takes with {'; with '.join(each)}.",)
    question = PlanQuestion(best.request, schedule=GPIPE_REVERSED.name, plan=best.plan)
    return PlanningProblem(workload.name, workload.source, question, notes)


def _answer_ways(
    config: DictConfig, workload: FullGraphWorkload, cluster: Cluster, ways: int
) -> WaysAnswer:
    num_devices, most = cluster.num_devices, workload.samples_per_device
    if num_devices % ways:
        raise ValueError(f"ways={ways} has to divide the {num_devices} devices")
    chunks = max(1, CHUNKS_PER_DEVICE * num_devices // ways)
    if ways == num_devices:  # graph parallelism alone: layers see all vertices
        chunks = 1
    model, works = workload.in_ways(ways, chunks)
    kinds = [cluster.device_kind(name) for name in cluster.kinds]
    sizes = sorted({most / chunks / 2, most / chunks, float(most)})
    request = plan_request(
        model.graph,
        cluster,
        minibatch_size=most,
        costs=roofline_costs(works, kinds, sizes),
        num_microbatches=chunks,
        schedule=GPIPE_REVERSED.name,
        max_replicas=1,
    )
    return answer_ways(request, model, chosen_planner(config, BALANCED))
