"""From names of modules to the operators they stand for."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from lightning_gpp.graph import ModelGraph, OpNode


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
