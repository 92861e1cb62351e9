"""Which operators do the same work, so that what they cost is one quantity.

Measured one by one, equal layers seem to differ by what the machine did meanwhile, and a planner
would cut where the differences tell it to.
"""

from __future__ import annotations

import re
from collections.abc import Hashable

from torch import fx, nn

from lightning_gpp.capture.model import CapturedModel
from lightning_gpp.capture.operators.fingerprint import constant_text
from lightning_gpp.capture.operators.normalize import function_name
from lightning_gpp.graph import OpNode


def work_of(operator: OpNode, captured: CapturedModel) -> Hashable:
    """Equal for operators that do the same work.

    They make the same calls with the same settings, on inputs and parameters of the same shapes.
    """
    graph, module = captured.graph, captured.module
    given = {item.value.name: item.requires_grad for item in graph.inputs}
    read = tuple((graph.values[name].tensors, given.get(name)) for name in operator.inputs)
    parameters = [module.get_parameter(name) for name in operator.parameters]
    held = tuple((tuple(p.shape), str(p.dtype), p.requires_grad) for p in parameters)
    numbers: dict[str, int] = {}

    def numbered(match: re.Match[str]) -> str:
        return f"%{numbers.setdefault(match[0], len(numbers))}"

    calls = [
        f"{_called(node, captured)} %{node.name} {constant_text([node.args, node.kwargs])}"
        for node in captured.nodes(operator.name)
    ]
    return re.sub(r"%\w+", numbered, "\n".join(calls)), read, held


def _called(node: fx.Node, captured: CapturedModel) -> str:
    if node.op == "call_module":
        module = captured.module.get_submodule(str(node.target))
        return f"{type(module).__module__} {module!r} {[*map(_settings, module.modules())]}"
    return f"{node.op} {function_name(node)}"


def _settings(module: nn.Module) -> list[tuple[str, object]]:
    """Plain attributes of a module: not all of them are in its text (numbers of heads)."""
    return [(name, value) for name, value in vars(module).items() if isinstance(value, _PLAIN)]


_PLAIN = (bool, int, float, str, tuple, type(None))
