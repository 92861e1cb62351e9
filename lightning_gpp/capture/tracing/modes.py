"""Train and eval mode: two traces that must be one graph."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from torch import fx, nn

from lightning_gpp.capture.tracing.keep_whole import KeepWholeError
from lightning_gpp.capture.tracing.trace import Call, Trace


class ModeDifferenceError(KeepWholeError):
    """The two modes run different operators."""


def mode_flags(
    module: nn.Module, train_modes: Mapping[str, bool] | None
) -> dict[bool, dict[str, bool]]:
    """The training flag of every sub-module, by qualified name, for train and for eval mode.

    Args:
        module: whose flags are taken for train mode if it is in train mode; else all are True.
        train_modes: flags in train mode that the user gives instead; names that are missing train.
    """
    names = [name for name, _ in module.named_modules()]
    if train_modes is not None:
        train = {name: train_modes.get(name, True) for name in names}
    elif module.training:
        train = {name: item.training for name, item in module.named_modules()}
    else:
        train = dict.fromkeys(names, True)
    return {True: train, False: dict.fromkeys(names, False)}


def check_same_graph(train: Trace, evaluation: Trace) -> None:
    """Checks that two normalized traces differ in constants at most.

    Raises:
        ModeDifferenceError: they do not; names the first place where they part.
    """
    nodes, others = list(train.graph.nodes), list(evaluation.graph.nodes)
    together = itertools.takewhile(
        lambda pair: pair[0] == pair[1], zip(train.calls, evaluation.calls)
    )
    calls = frozenset(call for call, _ in together)
    for node, other in zip(nodes, others, strict=False):
        if _skeleton(node) != _skeleton(other):
            raise _difference(node, other, calls)
    if len(nodes) != len(others) or train.output != evaluation.output:
        raise _difference(nodes[-1], others[-1], calls)


def _skeleton(node: fx.Node) -> Any:
    """What must be the same in both modes: everything but the constants."""
    target = "output" if node.op == "output" else node.target
    arguments = fx.node.map_aggregate((node.args, node.kwargs), _node_name)
    return node.op, target, node.name, arguments, node.meta.get("switches")


def _node_name(argument: Any) -> Any:
    return ("node", argument.name) if isinstance(argument, fx.Node) else None


def _difference(node: fx.Node, other: fx.Node, calls: frozenset[Call]) -> ModeDifferenceError:
    """What to say where two traces part; ``calls`` are those that both had made by then."""
    places = [item.meta for item in (node, other) if "scope" in item.meta]
    # A branch is taken by the innermost running module that both modes have entered.
    stacks = [[call for call in meta["calls"] if call in calls] for meta in places]
    scope = max(stacks, key=len)[-1].name if stacks else ""
    lines = " and ".join(dict.fromkeys(meta["location"] for meta in places))
    return ModeDifferenceError(
        f"forward runs different operators in train and in eval mode, first at {lines or 'the end'}"
        f" (in module {scope!r}): keep the difference inside of one sub-module, which then is one "
        "operator",
        scope,
    )
