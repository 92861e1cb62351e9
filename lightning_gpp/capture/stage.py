"""A stage as one Python function over the user's own modules.

The nodes of a stage are written out as straight-line source, one function per mode:

.. code-block:: python

    def stage(v_x, v_size):
        v_conv = m_0(v_x)          # the user's sub-module itself
        v_mul = f_0(v_conv, m_1.scale)  # a parameter, looked up at the call
        v_conv = None              # freed where eager Python would free it
        return (v_mul,)

so a stage costs no more than the user's own forward, and follows whatever happens to the modules
(moved, swapped parameters) after capture.
"""

from __future__ import annotations

import itertools
import keyword
import linecache
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

_numbers = itertools.count()


class StageModule:
    """Runs some operators of a captured model.

    Attributes:
        inputs: names of the values it is called with.
        outputs: names of the values it returns.
        module: the user's module.
        captured_on: device of the capture.
        parameter_names: canonical names of the parameters it reads.
        buffer_names: canonical names of the buffers it reads.
    """

    def __init__(
        self,
        module: nn.Module,
        nodes: Mapping[bool, Sequence[fx.Node]],
        inputs: Sequence[str],
        outputs: Sequence[str],
        tensors_read: tuple[Sequence[str], Sequence[str]],
        device: torch.device,
    ) -> None:
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self.parameter_names, self.buffer_names = map(tuple, tensors_read)
        self.module, self.captured_on = module, device
        self._sources = {mode: _Source(self, of_mode) for mode, of_mode in nodes.items()}
        self._functions: dict[tuple[bool, torch.device], Callable[..., tuple[Any, ...]]] = {}
        self._compiled_with: Mapping[str, Any] | None = None

    def compile(self, options: Mapping[str, Any]) -> None:
        """Compiles the functions of this stage, each as one graph, when they are first called.

        What was captured has no graph breaks, as it is straight-line code; a module that is kept
        whole may have some, which is torch's error at the first call.

        Args:
            options: of ``torch.compile``.
        """
        self._compiled_with = options
        self._functions.clear()

    def __call__(self, values: Sequence[Any], *, training: bool) -> tuple[Any, ...]:
        """The values of ``outputs`` from the values of ``inputs``; see :meth:`bound`."""
        return self.bound(values, training)(*values)

    def bound(
        self, values: Sequence[Any], training: bool, weights: Mapping[str, Tensor] | None = None
    ) -> Callable[..., tuple[Any, ...]]:
        """The function of the values of ``inputs``, for the device of some that are like them.

        ``training`` picks the graph; the modules' own training flags are the caller's business.
        ``weights`` take the place of parameters of their canonical names.

        Raises:
            GuardError: by the function, where a decision frozen at capture comes out differently.
            KeyError: the stage reads no parameter of the name of one of the weights.
        """
        key = (training, self._device(values))
        if key not in self._functions:
            function = self._sources[training].bind(key[1])
            if self._compiled_with is not None:
                function = torch.compile(function, fullgraph=True, **self._compiled_with)
            self._functions[key] = function
        function = self._functions[key]
        if weights is None:
            return function
        given = {place: weight for name, weight in weights.items() for place in self._places[name]}
        holder = _Holder(self.module)
        return lambda *values: torch.func.functional_call(
            holder, given, (function, *values), tie_weights=False
        )

    @cached_property
    def _places(self) -> dict[str, list[str]]:
        """Where each parameter is in what is called with others."""
        places: dict[int, list[str]] = {}
        for place, parameter in self.module.named_parameters(remove_duplicate=False):
            places.setdefault(id(parameter), []).append(f"module.{place}")
        own = ((name, self.module.get_parameter(name)) for name in self.parameter_names)
        return {name: places[id(parameter)] for name, parameter in own}

    def _device(self, values: Sequence[Any]) -> torch.device:
        """Where the stage computes; some of its values are on the CPU on any device (lengths)."""
        for value in (*values, *map(self.module.get_parameter, self.parameter_names[:1])):
            if isinstance(value, Tensor) and value.device.type != "cpu":
                return value.device
        return torch.device("cpu") if self.captured_on.type == "meta" else self.captured_on


class _Holder(nn.Module):
    """Calls a function of a module's operators while other tensors stand for its parameters.

    Only the attributes of the module are exchanged, for the time of the call: what autograd has
    saved belongs to the tensors that were given. Exchanging the data of the parameters instead
    gives some operators' backwards the old values and others' the new ones.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[..., tuple[Any, ...]], *values: Any) -> tuple[Any, ...]:
        """The function itself."""
        return function(*values)


class _Source:
    """Writes the function and keeps the objects it names."""

    def __init__(self, stage: StageModule, nodes: Sequence[fx.Node]) -> None:
        self.stage, outputs = stage, stage.outputs
        self.objects: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        lines = [f"def stage({', '.join(map(_variable, stage.inputs))}):"]
        last_reader = {
            value.name: node.name
            for node in nodes
            for value in (node, *node.all_input_nodes)
            if value.op != "get_attr" and value.name not in outputs
        }
        dead: dict[str, list[str]] = {}
        for name, reader in last_reader.items():
            dead.setdefault(reader, []).append(_variable(name))
        for node in nodes:
            lines += self._statement(node)
            if node.name in dead:
                lines.append(f"    {' = '.join(dead[node.name])} = None")
        lines.append(f"    return ({''.join(f'{_variable(name)}, ' for name in outputs)})")
        self.text = "\n".join(lines) + "\n"

    def bind(self, device: torch.device) -> Callable[..., tuple[Any, ...]]:
        """The compiled function, with constants on ``device``."""
        filename, lines = f"<stage {next(_numbers)}>", self.text.splitlines(keepends=True)
        linecache.cache[filename] = (len(self.text), None, lines, filename)
        names = {name: self._moved(value, device) for name, value in self.objects.items()}
        exec(compile(self.text, filename, "exec"), names)
        function: Callable[..., tuple[Any, ...]] = names["stage"]
        return function

    def _moved(self, value: Any, device: torch.device) -> Any:
        """A constant on the stage's device if it was on the device of the capture."""
        if isinstance(value, torch.device) and value == self.stage.captured_on:
            return device
        if isinstance(value, Tensor) and value.device == self.stage.captured_on:
            return value.to(device)
        return value

    def _statement(self, node: fx.Node) -> list[str]:
        args = [self._expression(arg) for arg in node.args]
        for key, value in node.kwargs.items():
            text = self._expression(value)
            args.append(f"{key}={text}" if _is_name(key) else f"**{{{key!r}: {text}}}")
        if node.op == "call_module":
            target = self.stage.module.get_submodule(str(node.target))
            call = f"{self._object('m', target)}({', '.join(args)})"
        elif node.op == "call_method":
            call = f"{args[0]}.{node.target}({', '.join(args[1:])})"
        else:
            call = f"{self._object('f', node.target)}({', '.join(args)})"
        line = f"{_variable(node.name)} = {call}  # {node.meta['location']}"
        switches = node.meta["switches"]
        contexts = [f"{self._object('c', each)}({self._items(given)})" for each, given in switches]
        if contexts:
            return [f"    with {', '.join(contexts)}:", f"        {line}"]
        return [f"    {line}"]

    def _expression(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self._attribute(value) if value.op == "get_attr" else _variable(value.name)
        if isinstance(value, slice):
            return f"slice({self._items([value.start, value.stop, value.step])})"
        if type(value) is tuple:
            return f"({self._items(value)})"
        if isinstance(value, list):
            return f"[{self._items(value)}]"
        if isinstance(value, dict):
            items = (f"{self._expression(k)}: {self._expression(v)}, " for k, v in value.items())
            return f"{{{''.join(items)}}}"
        is_number = type(value) is float and math.isfinite(value)
        if is_number or value is None or type(value) in (bool, int, str, type(...)):
            return repr(value)
        return self._object("k", value)

    def _items(self, values: Iterable[Any]) -> str:
        return "".join(f"{self._expression(item)}, " for item in values)

    def _attribute(self, node: fx.Node) -> str:
        path, _, attribute = str(node.target).rpartition(".")
        owner = self._object("m", self.stage.module.get_submodule(path))
        return f"{owner}.{attribute}" if _is_name(attribute) else f"getattr({owner}, {attribute!r})"

    def _object(self, kind: str, value: Any) -> str:
        if id(value) not in self._names:
            self._names[id(value)] = f"{kind}_{len(self._names)}"
            self.objects[self._names[id(value)]] = value
        return self._names[id(value)]


def _variable(name: str) -> str:
    return f"v_{name}"


def _is_name(text: str) -> bool:
    return text.isidentifier() and not keyword.iskeyword(text)
