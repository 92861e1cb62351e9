"""Plans by hand: a plan, its JSON, or the module names of every stage."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_gpp.common.checks import short_list
from lightning_gpp.common.graph_order import find_cycle
from lightning_gpp.common.strict_json import from_data
from lightning_gpp.graph import ModelGraph, OpNode, stage_graph
from lightning_gpp.planner.plan.plan import FORMAT, Plan, Stage, load_plan
from lightning_gpp.planner.units import order_to_end, output_makers

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
        shares: as there, together the ``microbatch_multiple``.
    """

    modules: tuple[str, ...]
    device: int | None = None
    devices: tuple[int, ...] | None = None
    microbatch_multiple: int | None = None
    recompute: bool = False
    shares: tuple[int, ...] = ()

    def stage(self, id: int, operators: tuple[str, ...], position: int) -> Stage:
        """The stage of a plan, with its operators known."""
        devices, multiple = self.devices, self.microbatch_multiple
        if devices is None:
            devices = (position if self.device is None else self.device,)
        if multiple is None:
            multiple = sum(self.shares) or len(devices)
        return Stage(id, operators, devices, multiple, self.recompute, self.shares)

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
        plan = FORMAT.from_data(Plan, plan, source="plan")
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
    if missing := [o.target for o in graph if is_module(o) and o.name not in claimed]:
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
    order = _ordered_stages(graph, claimed, labels)
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


def _ordered_stages(
    graph: ModelGraph, stage_of: Mapping[str, int], labels: Sequence[str]
) -> list[int]:
    """The positions of the stages in topological order, close to the order in which they came.

    Operators in no stage hand on what they read. The last stage is one that an output comes from.
    """
    made: dict[str, set[int]] = {}  # operator -> the stages that its results come from
    successors: dict[int, set[int]] = {stage: set() for stage in range(len(labels))}
    for operator in graph:
        read = set[int]().union(*(made[name] for name in graph.predecessors[operator.name]))
        stage = stage_of.get(operator.name)
        made[operator.name] = read if stage is None else {stage}
        if stage is not None:
            for source in read - {stage}:
                successors[source].add(stage)
    if cycle := find_cycle(successors):
        names = " to ".join(labels[stage] for stage in (*cycle, cycle[0]))
        raise ValueError(
            f"plan: stages depend on each other in a circle, from {names}; put what lies between "
            "into one stage, or split one of them"
        )
    ends = sinks = {stage for stage, targets in successors.items() if not targets}
    makers = output_makers(graph)
    sources = [made[name] for name in makers]
    if makers and all(sources):  # an output made of the inputs alone can be made anywhere
        ends = sinks.intersection(set[int]().union(*sources))
    if not ends:
        raise ValueError(
            f"plan: {', '.join(labels[stage] for stage in sorted(sinks))} would come last, but no "
            "output of the model is made there, and the loss is computed in the last stage; join "
            f"it with the stage of {' or '.join(makers)}"
        )
    order = order_to_end(successors, ends)
    assert order is not None  # there is an end and no circle
    return order


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
    stage_of_name: dict[str, int] = {}
    for stage, names in enumerate(stage_names):
        for name in names:
            if (first := stage_of_name.setdefault(name, stage)) != stage:
                raise ValueError(
                    f"plan: {name!r} is named in stage {first} and in stage {stage}; name it once"
                )
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
    modules = list(dict.fromkeys(o.scope.split(".")[0] for o in graph if o.scope))
    inside = [o.target for o in graph if is_module(o) and name.startswith(f"{o.target}.")]
    if inside:
        return (
            f"plan: {name!r} is inside {inside[0]!r}, which was captured as one operator; name "
            f"{inside[0]!r} instead"
        )
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    meant = f"did you mean {close[0]!r}? " if close else ""
    return f"plan: {name!r} is not in this model; {meant}its modules: {short_list(modules)}"
