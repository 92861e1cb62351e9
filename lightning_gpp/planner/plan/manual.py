"""Plans made by hand: a plan, its JSON form, or just the names of the modules of every stage."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_gpp.common.checks import short_list
from lightning_gpp.common.strict_json import from_data
from lightning_gpp.graph import ModelGraph, stage_graph
from lightning_gpp.planner.plan.module_names import claim_operators, is_module
from lightning_gpp.planner.plan.plan import Plan, Stage
from lightning_gpp.planner.plan.plan_json import load_plan, plan_from_data
from lightning_gpp.planner.plan.stage_order import ordered_stages
from lightning_gpp.planner.plan.whole_shares import MOST_PARTS, least_parts, whole_shares

PlanLike = Plan | str | Path | Mapping[str, Any] | Sequence[Any]
"""What :func:`resolve_plan` takes."""


@dataclass(frozen=True, slots=True)
class NamedStage:
    """A stage as a person writes it.

    Attributes:
        modules: qualified names of modules (``"encoders.image"``) or names of operators.
        device: index of its device; the position in the list if not given.
        devices: indices of the devices of its replicas, instead of ``device``.
        microbatch_multiple: as in :class:`~lightning_gpp.planner.plan.plan.Stage`; by default the
            number of its devices.
        recompute: as in :class:`~lightning_gpp.planner.plan.plan.Stage`.
        shares: as there, together the ``microbatch_multiple``; or fractions that sum to one, which
            are rounded to whole numbers of the ``microbatch_multiple``, by default the least of
            which they are whole numbers.
    """

    modules: tuple[str, ...]
    device: int | None = None
    devices: tuple[int, ...] | None = None
    microbatch_multiple: int | None = None
    recompute: bool = False
    shares: tuple[float, ...] = ()

    def stage(self, id: int, operators: tuple[str, ...], position: int) -> Stage:
        """The stage of a plan, with its operators known."""
        devices, multiple = self.devices, self.microbatch_multiple
        if devices is None:
            devices = (position if self.device is None else self.device,)
        shares = self._whole_shares(f"plan: stage {position} ({self})", len(devices))
        if multiple is None:
            multiple = sum(shares) or len(devices)
        return Stage(id, operators, devices, multiple, self.recompute, shares)

    def _whole_shares(self, where: str, num_replicas: int) -> tuple[int, ...]:
        """The shares as a plan has them.

        Raises:
            ValueError: they are no fractions; the text names the stage.
        """
        if all(float(share).is_integer() for share in self.shares):
            return tuple(map(int, self.shares))
        total_is_one = math.isclose(sum(self.shares), 1.0, abs_tol=1e-6)
        if len(self.shares) != num_replicas or min(self.shares) <= 0 or not total_is_one:
            raise ValueError(
                f"{where}: expected one share for each of its {num_replicas} devices, positive "
                f"and together 1 (or whole numbers of micro-batches), got {list(self.shares)}"
            )
        parts = self.microbatch_multiple or least_parts(self.shares)
        if parts is None:
            raise ValueError(
                f"{where}: the shares {list(self.shares)} are whole numbers of no micro-batch of "
                f"{MOST_PARTS} parts or less; say with microbatch_multiple to how many to round"
            )
        if parts < num_replicas:
            raise ValueError(
                f"{where}: microbatch_multiple {parts} leaves one of its {num_replicas} devices "
                "without a share; raise it"
            )
        return whole_shares(self.shares, parts)

    def __str__(self) -> str:
        return f"[{', '.join(self.modules)}]"


def resolve_plan(plan: PlanLike, graph: ModelGraph) -> Plan:
    """The plan that a user means.

    Args:
        plan: a :class:`Plan`; the path of a plan file; a mapping in the JSON form of plans; or a
            sequence of stages, each a sequence of module names or a mapping such as ``{"modules":
            ["encoders.image"], "devices": [1, 2], "recompute": True}``. A name stands for the
            module with all modules in it; the longest name that matches an operator wins.
            Operators that are no modules and that nobody names find their stage themselves: what
            works on the result of one stage stays there; what joins several stages (a ``cat``) or
            reads inputs of the model alone goes to its earliest consumer. Stages may be listed in
            any order; they are numbered topologically and keep their devices.
        graph: the model.

    Raises:
        ValueError: the plan is not of such a form, a name matches nothing, a module is in no
            stage, or stages depend on each other in a circle.
    """
    if isinstance(plan, (str, Path)):
        found = load_plan(plan)
        try:
            return resolve_plan(found, graph)
        except ValueError as error:
            raise ValueError(f"plan {str(plan)!r}: {error}") from error
    elif isinstance(plan, Mapping):
        plan = plan_from_data(plan)
    if isinstance(plan, Plan):
        stage_graph(graph, plan.stage_operators)
        return plan
    if not isinstance(plan, Sequence):
        raise ValueError(
            f"not a plan: {plan!r}; expected a Plan, the path of a plan file, a mapping in the "
            "form of plan files, or a list of stages, each a list of module names"
        )
    return _from_names([_named_stage(item, position) for position, item in enumerate(plan)], graph)


def _named_stage(item: object, position: int) -> NamedStage:
    data = dict(item) if isinstance(item, Mapping) else {"modules": item}
    modules = data.get("modules")
    if isinstance(modules, str):
        data["modules"] = [modules]
    elif isinstance(modules, Sequence):
        data["modules"] = list(modules)
    stage = from_data(NamedStage, data, where=f"plan: stage {position}")
    if not stage.modules:
        raise ValueError(f"plan: stage {position} names no module")
    if stage.device is not None and stage.devices is not None:
        raise ValueError(f"plan: stage {position} has both device and devices; give one of them")
    return stage


def _from_names(named: Sequence[NamedStage], graph: ModelGraph) -> Plan:
    if not named:
        raise ValueError("a plan needs at least one stage, got an empty list")
    claimed = claim_operators(graph, [stage.modules for stage in named])
    if missing := [o.name for o in graph if is_module(o) and o.name not in claimed]:
        raise ValueError(
            f"the plan does not cover the model: no stage names {short_list(missing)}; add these "
            "modules, or modules that contain them, to stages"
        )
    order = ordered_stages(graph, claimed, [str(stage) for stage in named])
    place_of = {position: place for place, position in enumerate(order)}
    stage_of = _with_others(graph, {name: place_of[pos] for name, pos in claimed.items()})
    stages = []
    for place, position in enumerate(order):
        operators = tuple(o.name for o in graph if stage_of[o.name] == place)
        stages.append(named[position].stage(place, operators, position))
    return Plan(tuple(stages), planner="manual")


def _with_others(graph: ModelGraph, stage_of: Mapping[str, int]) -> dict[str, int]:
    """Adds the operators in no stage.

    What works on the result of one stage stays there. What joins several stages (a ``cat`` of two
    towers) goes to its earliest consumer, so that the towers stay independent; without a consumer
    to its latest producer. What reads inputs of the model alone goes to its earliest consumer too;
    without one it makes an output of inputs and goes last.
    """
    placed = dict(stage_of)
    for operator in graph:
        before = {placed.get(name) for name in graph.predecessors[operator.name]}
        if operator.name not in placed and len(before) == 1:
            (stage,) = before
            if stage is not None:
                placed[operator.name] = stage
    for operator in reversed(graph.operators):
        after = [placed[name] for name in graph.successors[operator.name] if name in placed]
        if operator.name not in placed and after:
            placed[operator.name] = min(after)
    last = max(stage_of.values())
    for operator in graph:
        producers = [placed[name] for name in graph.predecessors[operator.name]]
        placed.setdefault(operator.name, max(producers, default=last))
    return placed
