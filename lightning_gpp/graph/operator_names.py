"""Short names for groups of operators: the modules that they make up."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from lightning_gpp.graph import ModelGraph, OpNode

MAX_FUNCTIONS = 3
"""How many functions of a stage are named."""


def summarize_operators(graph: ModelGraph, operators: Collection[str]) -> str:
    """Names what a stage holds by the outermost modules that are in it completely.

    ``encoders.image (3)`` stands for all three operators of that module, ``layers.0-3`` for
    numbered modules, ``cat`` for a function outside of modules.

    Args:
        graph: the model.
        operators: names of the stage's operators.
    """
    inside, members = set(operators), dict[str, set[str]]()
    for operator in graph:
        for module in _modules(operator):
            members.setdefault(module, set()).add(operator.name)
    whole, functions = dict[str, int](), dict[str, None]()
    for operator in graph:
        if operator.name not in inside:
            continue
        home = next((m for m in _modules(operator) if members[m] <= inside), None)
        if home is None:
            functions[operator.target.rpartition(".")[2]] = None
        else:
            whole[home] = whole.get(home, 0) + 1
    named = list(functions)
    if len(named) > MAX_FUNCTIONS:
        named[MAX_FUNCTIONS:] = ["…"]
    outermost_first = sorted(whole.items(), key=lambda item: item[0].count("."))
    return ", ".join([*_ranges(outermost_first), *named])


def _modules(operator: OpNode) -> list[str]:
    """The modules that an operator is in, the outermost first."""
    parts = operator.scope.split(".") if operator.scope else []
    return [".".join(parts[: depth + 1]) for depth in range(len(parts))]


def _ranges(modules: Iterable[tuple[str, int]]) -> list[str]:
    """Joins modules with consecutive numbers: ``layers.0``, ``layers.1`` -> ``layers.0-1``."""
    runs: list[tuple[str, str, str, int]] = []
    for name, count in modules:
        parent, _, last = name.rpartition(".")
        if runs and last.isdigit() and runs[-1][0] == parent and runs[-1][2].isdigit():
            _, first, previous, total = runs[-1]
            if int(last) == int(previous) + 1:
                runs[-1] = (parent, first, last, total + count)
                continue
        runs.append((parent, last, last, count))
    texts = []
    for parent, first, last, count in runs:
        name = f"{parent}.{first}" if parent else first
        number = f" ({count})" if count > 1 else ""
        texts.append(f"{name}{f'-{last}' if last != first else ''}{number}")
    return texts
