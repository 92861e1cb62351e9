"""The problem of a model on one graph: into how many ways its vertices are divided."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from omegaconf import DictConfig

from lightning_gpp.cluster import Cluster
from lightning_gpp.cost import roofline_costs
from lightning_gpp.jobs.problem.problem import PlanningProblem, strategy_option
from lightning_gpp.planner import BALANCED, plan_request
from lightning_gpp.planner.ways.answers import (
    WaysAnswer,
    WaysQuestion,
    answer_ways,
    numbers_of_ways,
)
from lightning_gpp.schedule import GPIPE_REVERSED
from lightning_gpp.workloads import FullGraphWorkload

CHUNKS_PER_DEVICE = 4
"""Of GNNPipe's experiments (arXiv 2308.10087)."""


def is_full_graph(config: DictConfig) -> bool:
    """Whether the strategy trains on one graph."""
    strategy = config.strategy
    if isinstance(strategy, str):
        return strategy == "gnnpipe"
    return str(strategy.get("_target_", "")).endswith("GNNPipeStrategy")


def full_graph_planner(config: DictConfig) -> str:
    """The planner that divides the layers of a model on one graph."""
    asked = strategy_option(config, "planner") if is_full_graph(config) else config.planner
    return str(asked or BALANCED)


@dataclass(frozen=True)
class FullGraphProblem:
    """A question per number of ways.

    Attributes:
        name: of the model.
        source: where the graph and the costs come from.
        cluster: the devices.
        question: number of ways, and of chunks -> the question.
        chunks: how many there are; None for four per device, of all ways together.
        ways: the number that is asked for; None for the best one.
    """

    name: str
    source: str
    cluster: Cluster
    question: Callable[[int, int], WaysQuestion]
    chunks: int | None = None
    ways: int | None = None

    def answers(self, ways: Sequence[int], planner: str) -> Iterator[WaysAnswer]:
        """The plan for every number of ways.

        Graph parallelism alone has one chunk: every layer sees all vertices.

        Raises:
            ValueError: a number of ways does not divide the devices.
        """
        num_devices = self.cluster.num_devices
        for count in ways:
            if num_devices % count:
                raise ValueError(f"ways={count} has to divide the {num_devices} devices")
        asked = (self.question(count, self._num_chunks(count)) for count in ways)
        return answer_ways(asked, planner)

    def _num_chunks(self, ways: int) -> int:
        num_devices = self.cluster.num_devices
        if ways == num_devices:
            return 1
        return self.chunks or max(1, CHUNKS_PER_DEVICE * num_devices // ways)

    def planned(self, planner: str) -> PlanningProblem:
        """The question for the ways that are asked for, or the best ones, with its answer."""
        ways = [self.ways] if self.ways else numbers_of_ways(self.cluster.num_devices)
        best = min(self.answers(ways, planner), key=lambda found: found.evaluation.step_s)
        question = best.question
        notes = list(question.notes)
        if len(ways) > 1:
            notes.append(
                f"ways={question.num_ways} is the best of {', '.join(map(str, ways))}; "
                "job=compare shows them all."
            )
        return PlanningProblem(
            self.name,
            self.source,
            question.request,
            GPIPE_REVERSED.name,
            tuple(notes),
            plan=best.plan,
        )


def workload_in_ways(
    workload: FullGraphWorkload, cluster: Cluster, config: DictConfig
) -> FullGraphProblem:
    """The problem of a network that is known by the statistics of its graph."""
    num_vertices = workload.samples_per_device

    def question(ways: int, chunks: int) -> WaysQuestion:
        model, works = workload.in_ways(ways, chunks)
        kinds = [cluster.device_kind(name) for name in cluster.kinds]
        size = num_vertices / chunks
        request = plan_request(
            model.graph,
            cluster,
            minibatch_size=num_vertices,
            costs=roofline_costs(works, kinds, sorted({size / 2, size, float(num_vertices)})),
            num_microbatches=chunks,
            schedule=GPIPE_REVERSED.name,
            max_replicas=1,
        )
        return WaysQuestion(request, model)

    return FullGraphProblem(
        workload.name,
        workload.source,
        cluster,
        question,
        strategy_option(config, "chunks"),
        config.ways,
    )
