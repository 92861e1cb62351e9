"""A short text for the operators of a stage: the modules they make up."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

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
    inside = set(operators)
    modules, functions = _split(graph, inside)
    parts = [*_modules_text(graph, inside, modules, prefix=()), *_functions_text(functions)]
    return ", ".join(parts)


def _split(graph: ModelGraph, inside: set[str]) -> tuple[list[OpNode], list[OpNode]]:
    chosen = [operator for operator in graph if operator.name in inside]
    return [o for o in chosen if o.scope], [o for o in chosen if not o.scope]


def _modules_text(
    graph: ModelGraph, inside: set[str], operators: Sequence[OpNode], prefix: tuple[str, ...]
) -> list[str]:
    """Texts for operators that share a prefix of module names, in the order of the model."""
    texts: list[str] = []
    whole: list[tuple[str, int]] = []
    children: dict[str, list[OpNode]] = {}
    for operator in operators:
        path = operator.scope.split(".")
        child = path[len(prefix)] if len(path) > len(prefix) else ""
        children.setdefault(child, []).append(operator)
    for child, members in children.items():
        if child == "":  # functions in the forward of a module of which only a part is here
            texts += _functions_text(members)
            continue
        inner = (*prefix, child)
        name = ".".join(inner)
        everything = [o.name for o in graph if f"{o.scope}.".startswith(f"{name}.")]
        if inside.issuperset(everything):
            whole.append((name, len(members)))
        else:
            texts += _modules_text(graph, inside, members, inner)
    return [*_ranges(whole), *texts]


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


def _functions_text(functions: Sequence[OpNode]) -> list[str]:
    names = list(dict.fromkeys(operator.target.rpartition(".")[2] for operator in functions))
    return [*names[:MAX_FUNCTIONS], "…"] if len(names) > MAX_FUNCTIONS else names
