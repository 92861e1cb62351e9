"""Plans made by hand: a plan, its JSON form, or just the names of the modules of every stage."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from lightning_gpp.common.checks import short_list
from lightning_gpp.common.strict_json import from_data
from lightning_gpp.graph import ModelGraph, stage_graph
from lightning_gpp.planner.plan.module_names import claim_operators, is_module
from lightning_gpp.planner.plan.plan import Plan, Stage, load_plan, plan_from_data
from lightning_gpp.planner.units.units import find_cycle, output_makers, topological_order

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


Reach = dict[str, dict[int, str]]
"""Operator -> stages whose values reach it, each with one value that left the stage on the way."""


def ordered_stages(
    graph: ModelGraph, stage_of: Mapping[str, int], labels: Sequence[str]
) -> list[int]:
    """The positions of the stages in topological order, close to the order in which they came.

    Operators in no stage hand on what they read. The last stage is one that an output comes from.

    Args:
        graph: the model.
        stage_of: operator name -> position of its stage; operators may be absent.
        labels: what to call the stages in errors.

    Raises:
        ValueError: stages depend on each other in a circle, or no stage can be the last one.
    """
    reach = _reach(graph, stage_of)
    handed: dict[tuple[int, int], str] = {}
    for name, stage in stage_of.items():
        for source, value in reach[name].items():
            if source != stage:
                handed.setdefault((source, stage), value)
    successors: dict[int, set[int]] = {stage: set() for stage in range(len(labels))}
    for source, target in handed:
        successors[source].add(target)
    if cycle := find_cycle(successors):
        raise ValueError(_cycle_text(cycle, handed, labels))
    last = _last_stage(graph, stage_of, reach, successors)
    if last is None:
        sinks = [labels[stage] for stage, targets in successors.items() if not targets]
        raise ValueError(
            f"plan: {', '.join(sinks)} would come last, but no output of the model is made there, "
            f"and the loss is computed in the last stage; join it with the stage of "
            f"{' or '.join(output_makers(graph))}"
        )
    for stage in successors:
        if stage != last:
            successors[stage].add(last)
    return topological_order(successors)


def _reach(graph: ModelGraph, stage_of: Mapping[str, int]) -> Reach:
    reach: Reach = {}
    for operator in graph:
        reached: dict[int, str] = {}
        reach[operator.name] = reached
        for value in operator.inputs:
            producer = graph.producer.get(value)
            if producer is None:
                continue
            if producer in stage_of:
                reached.setdefault(stage_of[producer], value)
            else:
                for stage, first in reach[producer].items():
                    reached.setdefault(stage, first)
    return reach


def _last_stage(
    graph: ModelGraph,
    stage_of: Mapping[str, int],
    reach: Reach,
    successors: Mapping[int, set[int]],
) -> int | None:
    sinks = {stage for stage, targets in successors.items() if not targets}
    makers = output_makers(graph)
    sources = [{stage_of[name]} if name in stage_of else set(reach[name]) for name in makers]
    if not all(sources) or not makers:  # an output made of the inputs alone can be made anywhere
        return max(sinks)
    return max(sinks.intersection(*[set().union(*sources)]), default=None)


def _cycle_text(
    cycle: Sequence[int], handed: Mapping[tuple[int, int], str], labels: Sequence[str]
) -> str:
    steps = [
        f"{labels[source]} hands {handed[source, target]!r} to {labels[target]}"
        for source, target in zip(cycle, [*cycle[1:], cycle[0]])
    ]
    return (
        f"plan: stages depend on each other in a circle: {'; '.join(steps)}; put what lies between "
        "into one stage, or split one of them"
    )


MOST_PARTS = 100
"""Fractions are taken as hundredths or coarser where nobody says how many parts there are."""


def whole_shares(fractions: Sequence[float], total: int) -> tuple[int, ...]:
    """Shares nearest to some fractions: whole, at least 1, together a total.

    Largest remainders: every share is rounded down, and those that lose most by it get one more.
    Shares that would be below 1 are 1, and the others divide what is left.

    Args:
        fractions: positive, of any sum.
        total: at least as many as there are fractions.

    Raises:
        ValueError: a fraction is not positive, or the total is too small.

    >>> whole_shares([0.5, 0.25, 0.25], 10), whole_shares([0.97, 0.01, 0.02], 10)
    ((5, 3, 2), (8, 1, 1))
    """
    if total < len(fractions) or min(fractions, default=0.0) <= 0:
        raise ValueError(
            f"expected positive fractions, and at least as many parts, got {list(fractions)} of "
            f"{total}"
        )
    shares = [1] * len(fractions)
    free = list(range(len(fractions)))
    while True:
        left = total - (len(fractions) - len(free))
        whole = sum(fractions[i] for i in free)
        exact = {i: fractions[i] / whole * left for i in free}
        small = [i for i in free if exact[i] < 1]
        if not small:
            break
        free = [i for i in free if i not in small]
    for i in free:
        shares[i] = math.floor(exact[i])
    by_remainder = sorted(free, key=lambda i: (shares[i] - exact[i], i))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return tuple(shares)


def least_parts(fractions: Sequence[float]) -> int | None:
    """The least number of parts of which fractions that sum to one are whole numbers.

    None where it is above :data:`MOST_PARTS`.

    >>> least_parts([0.75, 0.25]), least_parts([2 / 3, 1 / 3]), least_parts([0.123, 0.877])
    (4, 3, None)
    """
    near = [Fraction(fraction).limit_denominator(MOST_PARTS) for fraction in fractions]
    total = math.lcm(*(one.denominator for one in near))
    is_exact = all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(near, fractions))
    return total if is_exact and total <= MOST_PARTS else None
