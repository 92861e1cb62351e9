"""What the planning jobs plan: a published workload, or a graph file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from lightning_gpp.cluster import Cluster
from lightning_gpp.common.checks import check_whole
from lightning_gpp.common.data_file import read_text
from lightning_gpp.common.strict_json import parse_json
from lightning_gpp.cost import Costs, graph_work, load_costs
from lightning_gpp.graph import graph_from_json
from lightning_gpp.jobs.options import as_flag, as_text
from lightning_gpp.jobs.problem.problem import PlanningProblem, refitted, schedule_of
from lightning_gpp.planner import plan_request
from lightning_gpp.workloads import WORKLOADS, Workload, read_pipedream_profile, read_piper_workload

if TYPE_CHECKING:
    from lightning_gpp.simulate.refit.refit import Refit

EMPTY = Parameter.empty
"""Default of an argument without one."""


def workload_problem(workload: Workload, cluster: Cluster, config: DictConfig) -> PlanningProblem:
    """The problem of a workload, with the options of a configuration."""
    minibatch_size = config.minibatch_size
    if minibatch_size is None:
        minibatch_size = workload.minibatch_size(cluster.num_devices)
    check_whole("minibatch_size", minibatch_size)
    path = as_text("costs", config.costs)
    refit = None if path is None else refit_of(path)
    if path is not None and refit is None:
        costs = load_costs(path)
    else:
        costs = workload.costs_for(cluster, minibatch_size)
    check_seconds(costs, source=path or workload.name)
    request = plan_request(
        workload.graph,
        cluster,
        minibatch_size=minibatch_size,
        costs=costs,
        num_microbatches=config.num_microbatches,
        may_recompute=as_flag("recompute", config.recompute),
    )
    problem = PlanningProblem(workload.name, workload.source, request, schedule_of(config))
    return problem if refit is None else refitted(problem, refit)


def refit_of(path: str) -> Refit | None:
    """The refit in a file; None where the file holds something else.

    Raises:
        ValueError: it is a broken refit.
    """
    # Imports the simulator, which questions without a file of costs do not need.
    from lightning_gpp.simulate.refit.refit import is_refit_file, load_refit

    return load_refit(path) if is_refit_file(path) else None


def check_seconds(costs: Costs, *, source: str) -> None:
    """Refuses costs in which nothing takes time: rates would be infinite.

    Raises:
        ValueError: the text names the source.
    """
    seconds = (cost.forward_s + cost.backward_s for cost in costs.profiles[0].operators.values())
    if not any(seconds):
        raise ValueError(
            f"{source}: no operator takes any time; expected seconds above 0 for at least one"
        )


def workload_of(graph: str, options: Mapping[str, Any] | None = None) -> Workload:
    """A workload by its name, or from a file of any known form.

    Args:
        graph: name in :data:`~lightning_gpp.workloads.WORKLOADS`; or a file: a PipeDream profile
            (``.txt``), an input of Piper, or a model graph of ours (both ``.json``).
        options: of the model or the reader.

    Raises:
        ValueError: there is no such model or file, the file is broken, or an option is unknown.
    """
    reader = WORKLOADS.get(graph) or partial(_reader(_existing(graph)), graph)
    known = [
        name for name, option in signature(reader).parameters.items() if option.default is not EMPTY
    ]
    if unknown := [str(name) for name in options or {} if name not in known]:
        raise ValueError(
            f"graph_options of {graph}: unknown option {unknown[0]!r}; expected "
            f"{', '.join(known) or 'none'}"
        )
    return reader(**(options or {}))


def _existing(graph: str) -> Path:
    path = Path(graph)
    if not path.is_file():
        raise ValueError(
            f"graph={graph} is neither a file nor a known model ({', '.join(WORKLOADS)}); expected "
            "a PipeDream profile (.txt), an input of Piper or a model graph (.json)"
        )
    return path


def _reader(path: Path) -> Callable[..., Workload]:
    if path.suffix != ".json":
        return read_pipedream_profile
    data = parse_json(read_text(path, "an input of Piper or a model graph (JSON)"), str(path))
    is_ours = isinstance(data, Mapping) and "format" in data
    return read_graph_file if is_ours else read_piper_workload


def read_graph_file(path: str | Path) -> Workload:
    """A workload of a model graph in our own form; costs are estimated."""
    graph = graph_from_json(read_text(path, "a model graph (JSON)"), source=str(path))
    size = graph.microbatch_size
    return Workload(Path(path).stem, graph, graph_work(graph), size, source=str(path))
