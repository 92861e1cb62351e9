"""The question to planners that a configuration describes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from lightning_gpp.cluster import Cluster
from lightning_gpp.cluster.this_machine import CPU
from lightning_gpp.common.checks import check_whole
from lightning_gpp.common.text_table import wrapped
from lightning_gpp.common.units_of_measure import count_text
from lightning_gpp.jobs.options import as_text
from lightning_gpp.planner import GRAPHPIPE, PlanRequest
from lightning_gpp.planner.base import FASTEST, HeldVersions
from lightning_gpp.planner.plan_to_run import PlanQuestion
from lightning_gpp.schedule import ONE_F_ONE_B, find_schedule
from lightning_gpp.weights.policies import PIPEOPTIM, Policy, find_policy

if TYPE_CHECKING:
    from lightning_gpp.simulate.refit import Refit


@dataclass(frozen=True, slots=True)
class PlanningProblem:
    """A question to planners, and its origin.

    Attributes:
        name: name of the model.
        source: origin of the graph and the costs.
        question: the question that training would ask.
        notes: remarks for the user, such as that cached costs were used.
        refit: recorded steps that correct the costs.
    """

    name: str
    source: str
    question: PlanQuestion
    notes: tuple[str, ...] = ()
    refit: Refit | None = None

    @property
    def request(self) -> PlanRequest:
        """The question to planners."""
        return self.question.request

    def with_request(self, request: PlanRequest, **question: Any) -> PlanningProblem:
        """Another question about the same model."""
        return replace(self, question=replace(self.question, request=request, **question))

    def refitted(self, found: Refit) -> PlanningProblem:
        """The same question with costs and links corrected by recorded steps.

        Raises:
            ValueError: the refit is of another model.
        """
        notes = (*self.notes, f"Costs: {found.describe()}.")
        problem = self.with_request(found.request(self.request))
        return replace(problem, notes=notes, refit=found)

    def describe(self, *, max_width: int = 100) -> str:
        """Describes the model, the devices and the origin of the costs."""
        cluster = self.request.cluster
        hosts = len({device.host for device in cluster.devices})
        what = (
            f"{self.name}: {count_text(len(self.request.graph), 'operator')} for "
            f"{count_text(cluster.num_devices, 'device')} ({', '.join(cluster.kinds)}) in "
            f"{count_text(hosts, 'host')}, mini-batches of {self.request.minibatch_size}"
        )
        return wrapped([what, f"  from {self.source}", *self.notes], max_width)


def strategy_option(config: DictConfig, name: str) -> Any:
    """An option of the strategy; None where it has none of that name."""
    if isinstance(config.strategy, str):
        return None
    found: Any = config.strategy.get(name)
    return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found


def chosen_planner(config: DictConfig, default: str = GRAPHPIPE) -> str:
    """The planner that training would ask."""
    return str(strategy_option(config, "planner") or config.planner or default)


def cluster_of(config: DictConfig) -> Cluster:
    """The devices to plan for: for a recipe on this machine, as many as training would start."""
    ranks = OmegaConf.select(config, "trainer.devices")
    is_open = config.cluster.get("name") == CPU and config.cluster.num_devices is None
    trains = config.graph is None and isinstance(ranks, int) and ranks > 0
    options = {"num_devices": ranks} if is_open and trains else {}
    cluster: Cluster = instantiate(config.cluster, **options)
    return cluster


def schedule_of(config: DictConfig) -> str | None:
    """The schedule that is asked for, or ``fastest``; None leaves it to what fits into memory.

    Raises:
        ValueError: there is none of this name.
    """
    schedule = as_text("schedule", config.schedule)
    return schedule if schedule in (None, FASTEST) else find_schedule(schedule).name


def policy_of(config: DictConfig) -> Policy | None:
    """The policy of weights that training would use; None where its schedule drains.

    Raises:
        ValueError: there is none of this name.
    """
    schedule = schedule_of(config)
    if schedule in (None, FASTEST) or find_schedule(schedule).flushes:
        return None
    return find_policy(strategy_option(config, "weights") or PIPEOPTIM.name)


def per_update_of(config: DictConfig) -> int:
    """Mini-batches whose gradients are accumulated for one update.

    Raises:
        ValueError: it is no whole number above 0.
    """
    name = "trainer.accumulate_grad_batches"
    found: int = OmegaConf.select(config, name) or 1
    check_whole(name, found)
    return found


def with_policy(
    problem: PlanningProblem, policy: Policy | None, per_update: int
) -> PlanningProblem:
    """The problem with the versions of weights that a policy holds.

    Args:
        problem: with one version.
        policy: None where the schedule drains.
        per_update: mini-batches of an update.
    """
    if policy is None:
        return problem
    if policy.drains:  # the same training, as a synchronous schedule of one micro-batch
        request = replace(problem.request, num_microbatches=1, max_replicas=1)
        return problem.with_request(request, schedule=ONE_F_ONE_B.name)
    held = HeldVersions(*policy.held_versions(per_update))
    request = replace(problem.request, held_versions=held)
    return problem.with_request(request, uses_all_devices=False)  # as in training
