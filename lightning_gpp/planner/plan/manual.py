"""Plans made by hand: a plan, its JSON form, or just the names of the modules of every stage."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_gpp.common.checks import short_list
from lightning_gpp.common.strict_json import from_data
from lightning_gpp.graph import ModelGraph, OpNode, stage_graph
from lightning_gpp.planner.plan.plan import Plan, Stage, load_plan, plan_from_data
from lightning_gpp.planner.units.units import find_cycle, order_to_end, output_makers

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
            are whole numbers of it, by default the least one of which they are.
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
        known = self.microbatch_multiple
        for parts in range(1, MOST_PARTS + 1) if known is None else (known,):
            whole = [round(share * parts) for share in self.shares]
            if all(math.isclose(n, s * parts, rel_tol=1e-6) for n, s in zip(whole, self.shares)):
                return tuple(whole)
        raise ValueError(
            f"{where}: the shares {list(self.shares)} are whole numbers of no micro-batch of "
            f"{known or f'up to {MOST_PARTS}'} parts; give them as whole numbers, like [2, 1]"
        )

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
    stages = staged_operators(graph, claimed, [str(stage) for stage in named])
    return Plan(
        tuple(
            named[position].stage(place, operators, position)
            for place, (position, operators) in enumerate(stages)
        ),
        planner="manual",
    )


def staged_operators(
    graph: ModelGraph, claimed: Mapping[str, int], labels: Sequence[str]
) -> list[tuple[int, tuple[str, ...]]]:
    """Stages in topological order, as their positions with all of their operators.

    Args:
        graph: the model.
        claimed: operator name -> position of its stage; the others find theirs.
        labels: what to call the stages in errors.

    Raises:
        ValueError: stages depend on each other in a circle, or no stage can be the last one.
    """
    order = ordered_stages(graph, claimed, labels)
    place_of = {position: place for place, position in enumerate(order)}
    stage_of = _with_others(graph, {name: place_of[pos] for name, pos in claimed.items()})
    return [
        (position, tuple(o.name for o in graph if stage_of[o.name] == place))
        for place, position in enumerate(order)
    ]


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
    sinks, makers = {s for s, targets in successors.items() if not targets}, output_makers(graph)
    sources = [{stage_of[name]} if name in stage_of else set(reach[name]) for name in makers]
    ends = sinks
    if all(sources) and makers:  # an output made of the inputs alone can be made anywhere
        ends = sinks.intersection(*[set().union(*sources)])
    if not ends:
        raise ValueError(
            f"plan: {', '.join(labels[stage] for stage in sorted(sinks))} would come last, but no "
            "output of the model is made there, and the loss is computed in the last stage; join "
            f"it with the stage of {' or '.join(makers)}"
        )
    order = order_to_end(successors, ends)
    assert order is not None  # there is an end and no circle
    return order


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


def is_module(operator: OpNode) -> bool:
    """Whether the operator is a call of a module (and not a function between modules)."""
    return operator.scope != "" and operator.scope == operator.target


def claim_operators(graph: ModelGraph, stage_names: Sequence[Sequence[str]]) -> dict[str, int]:
    """Operator -> position of the stage that names it; operators that nobody names are absent.

    A name is an operator's name, a function (``torch.cat``), or a module with everything in it.
    The operator's name counts before the function, that before modules, inner before outer ones.

    Args:
        graph: the model.
        stage_names: the names of each stage.

    Raises:
        ValueError: a name is given twice or matches nothing, or a stage gets no operator.
    """
    stage_of_name = _stage_of_name(stage_names)
    claimed: dict[str, int] = {}
    matching: set[str] = set()
    for operator in graph:
        matches = [name for name in _names_of(operator) if name in stage_of_name]
        matching.update(matches)
        if matches:
            claimed[operator.name] = stage_of_name[matches[0]]
    for name in stage_of_name:
        if name not in matching:
            raise ValueError(_no_match(graph, name))
    for stage, names in enumerate(stage_names):
        if stage not in claimed.values():
            raise ValueError(
                f"plan: stage {stage} [{', '.join(names)}] gets no operator: longer names in other "
                "stages take all of them; remove the stage or name something else"
            )
    return claimed


def _stage_of_name(stage_names: Sequence[Sequence[str]]) -> dict[str, int]:
    stage_of: dict[str, int] = {}
    for stage, names in enumerate(stage_names):
        for name in names:
            if name in stage_of:
                raise ValueError(
                    f"plan: {name!r} is named in stage {stage_of[name]} and in stage {stage}; "
                    "name it once"
                )
            stage_of[name] = stage
    return stage_of


def _names_of(operator: OpNode) -> Iterator[str]:
    """What the operator can be called, most specific first."""
    yield operator.name
    if not is_module(operator):
        yield operator.target
    scope = operator.scope
    while scope:
        yield scope
        scope = scope.rpartition(".")[0]


def _no_match(graph: ModelGraph, name: str) -> str:
    known = list(dict.fromkeys(known for operator in graph for known in _names_of(operator)))
    for operator in graph:
        if is_module(operator) and name.startswith(f"{operator.target}."):
            return (
                f"plan: {name!r} is inside {operator.target!r}, which was captured as one "
                f"operator; name {operator.target!r} instead"
            )
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        remedy = f"did you mean {' or '.join(map(repr, close))}?"
    else:
        some = ", ".join(map(repr, known[:3]))
        remedy = f"expected a module or an operator of the model, such as {some}"
    return f"plan: {name!r} matches nothing in the model; {remedy}"
