"""The captured model: data for planners, and stages that run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_gpp.capture.checks.rollback import keep, owner_of
from lightning_gpp.capture.operators.fingerprint import (
    NodeContents,
    constant_text,
    node_contents,
)
from lightning_gpp.capture.operators.operators import model_graph, read_names
from lightning_gpp.capture.operators.variation import Cuts
from lightning_gpp.capture.stage import StageModule
from lightning_gpp.capture.tracing.frozen import Frozen
from lightning_gpp.capture.tracing.reads import Read
from lightning_gpp.capture.tracing.trace import Names, Trace
from lightning_gpp.capture.values.arguments import Arguments, OtherFormError
from lightning_gpp.capture.values.samples import Sample
from lightning_gpp.graph import ModelGraph


@dataclass(frozen=True, slots=True)
class Verified:
    """A checked trace as data, from which another process can trace the same without checking.

    Attributes:
        num_samples: samples in the inputs of the capture.
        whole: names of modules whose types stay whole because their own Python decides.
        nodes: of the first trace in training, in this order.
        cuts: how values can be cut.
        steady: names of the buffers that forward changes alike whatever its arguments are.
        reads: plain attributes that forward read and that must not change.
        is_random: whether forward draws random numbers from torch in training mode.
        observed: names of modules whose calls hooks of the user's look at and do not change.
        parted: where training and evaluation begin to run different operators; empty if they run
            the same. Then only one mode is captured.
        mode: training flag of that mode.
    """

    num_samples: int
    whole: tuple[str, ...] = ()
    nodes: NodeContents = ()
    cuts: Cuts = field(default_factory=Cuts)
    steady: frozenset[str] = frozenset()
    reads: tuple[Read, ...] = ()
    is_random: bool = False
    observed: tuple[str, ...] = ()
    parted: str = ""
    mode: bool = True


class CapturedModel:
    """A model as a graph of operators that still are the user's modules.

    Made by :func:`lightning_gpp.capture.capture`. All names are relative to the captured module.

    Attributes:
        module: the user's module, untouched.
        graph: the model as data.
        verified: how another process captures the same without checking it.
        takes_graphs: whether the inputs are a batch of graphs side by side, which cannot be cut
            along a dimension.
        kept_whole: a line for every class of modules that is one operator each because its own
            Python decides what it computes.
        decision: that of them which decides by the data, so that samples may depend on others; or
            what a backward does that may look at gradients of others.
        by_size: whether one of them decides by the number of samples, or by a drawn one.
    """

    def __init__(
        self,
        module: nn.Module,
        arguments: Arguments,
        traces: Mapping[bool, Trace],
        verified: Verified,
        sample: Sample,
    ) -> None:
        self.module, self.verified = module, verified
        self._arguments, self._traces, self._device = arguments, traces, sample.device
        self.takes_graphs = sample.graphs is not None
        self.kept_whole: tuple[str, ...] = ()
        self.decision: str | None = None
        self.by_size = False
        self._owned = Names.of(module).owned(module)
        self._parameter_names = frozenset(name for name, _ in module.named_parameters())
        self.graph: ModelGraph
        self.graph, self._nodes_of = model_graph(module, traces, verified.cuts)

    def take_graph(self, graph: ModelGraph, origins: Mapping[str, tuple[str, int]]) -> None:
        """Takes other data for the same operators.

        Args:
            graph: in which some may be left out, and others be there several times.
            origins: name in it -> (operator, which one of several); others make no calls.
        """
        self.graph, self.takes_graphs = graph, False
        made = {name: self._nodes_of[operator] for name, (operator, _) in origins.items()}
        self._nodes_of = {**self._nodes_of, **{op.name: () for op in graph}, **made}

    @property
    def changing(self) -> frozenset[str]:
        """Names of the buffers that forward changes in training mode."""
        return frozenset(name for operator in self.graph for name in operator.state)

    @property
    def unsteady(self) -> list[str]:
        """Those whose change depends on how samples are put together, BatchNorm's left out."""
        others = sorted(self.changing - self.verified.steady)
        return [name for name in others if not isinstance(owner_of(self.module, name), _BatchNorm)]

    @property
    def leaf_modules(self) -> tuple[str, ...]:
        """Qualified names of the modules that the stages call as a whole, and of opened layers."""
        names: dict[str, None] = {}
        for node in self._traces[True].graph.nodes:
            if (layer := node.meta.get("layer")) is not None:
                names[layer.name] = None
            elif node.op == "call_module":
                names[str(node.target)] = None
        return tuple(names)

    @cached_property
    def fingerprint(self) -> str:
        """Equal on two ranks exactly if they captured the same graph; weights do not count."""
        layout = [self._arguments.paths, self._arguments.names, dict(self._arguments.frozen)]
        groups = [[name, list(nodes)] for name, nodes in self._nodes_of.items()]
        parameters = self.module.named_parameters()
        shapes = [[name, list(item.shape), str(item.dtype)] for name, item in parameters]
        traces = [(node_contents(trace), str(trace.output)) for trace in self._traces.values()]
        text = f"{traces} {constant_text([layout, groups, shapes])}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def check_reads(self) -> None:
        """Checks that what forward reads, and goes through, is as it was at capture.

        Raises:
            GuardError: something changed.
        """
        self.frozen.check()

    @cached_property
    def frozen(self) -> Frozen:
        """What stays as it was when the model was captured; on rank 0."""
        return Frozen(self.module, self.verified.reads, self.leaf_modules)

    def inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Value name -> tensor for one call of the module's forward.

        Raises:
            OtherFormError: the call is of another form.
            ValueError: it differs from the captured one in an element type, or in an argument that
                is no tensor.
        """
        return self._arguments.tensors(args, kwargs)

    def inputs_of_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Like :meth:`inputs`, for a call now: the module has to be in a mode that was captured.

        Raises:
            OtherFormError: the call is of another form, or in a mode with another graph.
            ValueError: as :meth:`inputs`.
        """
        if self.verified.parted and self.module.training is not self.verified.mode:
            raise OtherFormError(
                f"{self.verified.parted}: move the branch on self.training into a sub-module, "
                "which stays whole"
            )
        return self.inputs(args, kwargs)

    def call(self, tensors: Mapping[str, Tensor]) -> Any:
        """Calls the module's own forward with arguments by name."""
        args, kwargs = self._arguments.rebuild(dict(tensors))
        return self.module.forward(*args, **kwargs)

    def output(self, values: Mapping[str, Any], *, training: bool | None = None) -> Any:
        """Builds forward's result from the values named by ``graph.outputs``.

        Args:
            values: value name -> value.
            training: the mode (constants among the outputs may differ); by default the one the
                module is in.
        """
        trace = self._traces[self.module.training if training is None else training]
        return trace.output.unflatten(
            [values[leaf.name] if isinstance(leaf, fx.Node) else leaf for leaf in trace.outputs]
        )

    def where_samples_meet(
        self, averaged: frozenset[str] | None, whole: Sequence[str] = ()
    ) -> str | None:
        """Why a batch must not be cut, as far as what forward calls tells.

        Args:
            averaged: outputs that are looked at, if those which are not one entry per sample are
                averaged, and so are compared by their values; None looks at all, and does not.
            whole: operators that are given all samples of the batch together.
        """
        cuts = self.verified.cuts
        if self.decision or cuts.decision:
            return self.decision or cuts.decision
        if whole and cuts.meeting <= {node for each in whole for node in self._nodes_of[each]}:
            return None
        for name in self.graph.outputs:
            where, is_per_sample = cuts.met.get(name, (None, False))
            if where and (averaged is None or (is_per_sample and name in averaged)):
                return where
        return None

    def all_nodes(self, *, training: bool) -> list[fx.Node]:
        """The calls of the forward in a mode, its inputs included, in their order."""
        return [node for node in self._traces[training].graph.nodes if node.op != "output"]

    def nodes(self, operator: str) -> list[fx.Node]:
        """The calls that an operator stands for, in training, in their order."""
        return self._in_order(self._nodes_of[operator], True)

    @cached_property
    def _numbered(self) -> dict[bool, dict[str, tuple[int, fx.Node]]]:
        """The calls of each mode by name, with their numbers."""
        return {
            mode: {node.name: (number, node) for number, node in enumerate(trace.graph.nodes)}
            for mode, trace in self._traces.items()
        }

    def _in_order(self, names: Iterable[str], training: bool) -> list[fx.Node]:
        numbered = self._numbered[training]
        return [node for _, node in sorted(map(numbered.__getitem__, numbered.keys() & {*names}))]

    def stage(
        self, operators: Sequence[str], inputs: Sequence[str], outputs: Sequence[str]
    ) -> StageModule:
        """A runnable stage.

        Call it after parameters were moved or swapped, or before: a stage looks at the module's
        current parameters whenever it runs.

        Args:
            operators: names of operators, in any order; they run in the order of the forward.
            inputs: names of the values it will be called with.
            outputs: names of the values to return; may be inputs too.
        """
        members = {node for name in operators for node in self._nodes_of[name]}
        nodes = {training: self._in_order(members, training) for training in self._traces}
        read = self.tensors_read(nodes[True])
        return StageModule(self.module, nodes, inputs, outputs, read, self._device)

    def tensors_read(self, nodes: Sequence[fx.Node]) -> tuple[list[str], list[str]]:
        """Canonical names of the parameters, and of the buffers, that calls read."""
        read = {name for node in nodes for name in read_names(node, self._owned)}
        return sorted(read & self._parameter_names), sorted(read - self._parameter_names)

    def keeper(self, operators: Sequence[str]) -> Callable[[], Callable[[], None]] | None:
        """What keeps the steady buffers of operators, and gives what puts them back.

        Args:
            operators: names of operators.
        """
        changing = {name for operator in operators for name in self.graph.operator[operator].state}
        names = sorted(changing & self.verified.steady)
        return partial(keep, self.module, names) if names else None
