"""Random branchy LightningModules: described by plain data, so that any process can build them.

:class:`BranchyModel` is built from a :class:`ModelSpec`; :func:`model_specs` draws random ones.
Nothing here knows of pipelines. Layers that mix the samples of a batch (BatchNorm) and random
ones (Dropout) are left out: with them micro-batches compute something else than whole batches, on
one device too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as lp
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from helpers.habits import HABITS, WIDTH, logged, with_default

INPUT_WIDTHS = (3, 5, 4)
"""Features of the first, second and third input."""

NUM_TARGETS = 3
"""Features (or classes) of every output."""

UNARY = ("linear", "mlp", "norm", "tanh", "gelu", "scale", "relu")
JOINS = ("add", "cat", "mul")
REUSE = ("again", "tied")


@dataclass(frozen=True)
class Node:
    """One step of a model's forward.

    Attributes:
        kind: one of :data:`UNARY`, :data:`JOINS`, :data:`REUSE`, or a name in
            :data:`~helpers.habits.HABITS`.
        reads: positions of earlier values (inputs first, then nodes).
        reuses: for :data:`REUSE`, the node whose layer (``again``) or weight (``tied``) it uses.
    """

    kind: str
    reads: tuple[int, ...]
    reuses: int | None = None


@dataclass(frozen=True)
class ModelSpec:
    """What a :class:`BranchyModel` computes.

    Attributes:
        num_inputs: inputs; each goes through a linear layer of its own first.
        nodes: steps in topological order; positions ``num_inputs …``.
        num_outputs: outputs. The first reads every value that nothing else reads.
        extra_reads: values read by the outputs after the first.
        signature: how the forward takes its inputs: ``"positional"``, ``"keyword"``,
            ``"dict"`` or ``"tuple"``.
        result: how it returns its outputs: ``"single"``, ``"tuple"``, ``"dict"``, ``"nested"``.
        loss: ``"regression"`` or ``"classification"``.
        seed: of the initial weights.
    """

    num_inputs: int
    nodes: tuple[Node, ...]
    extra_reads: tuple[int, ...] = ()
    signature: str = "positional"
    result: str = "single"
    loss: str = "regression"
    seed: int = 0

    @property
    def unread(self) -> tuple[int, ...]:
        """Values that no node reads."""
        read = {position for node in self.nodes for position in node.reads}
        return tuple(i for i in range(self.num_inputs + len(self.nodes)) if i not in read)


@dataclass(frozen=True)
class OptimizerSpec:
    """The optimizer and its scheduler.

    Attributes:
        name: ``"sgd"`` (with momentum) or ``"adamw"``.
        lr: learning rate.
        scheduler: None, ``"step"`` (every 3 steps), ``"epoch"`` (every epoch), ``"plateau"``.
        num_groups: parameter groups, the odd ones with half the learning rate.
    """

    name: str = "sgd"
    lr: float = 0.02
    scheduler: str | None = None
    num_groups: int = 1

    def build(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer over all parameters."""
        groups = [
            {"params": parameters[i :: self.num_groups], "lr": self.lr / (1 + i % 2)}
            for i in range(self.num_groups)
        ]
        if self.name == "sgd":
            return torch.optim.SGD(groups, lr=self.lr, momentum=0.9)
        # eps lies above the float32 noise of gradients that are zero in exact arithmetic.
        return torch.optim.AdamW(groups, lr=self.lr, eps=1e-5, weight_decay=0.02)

    def configure(self, parameters: list[nn.Parameter]) -> Any:
        """What ``configure_optimizers`` returns."""
        optimizer = self.build(parameters)
        schedulers = torch.optim.lr_scheduler
        if self.scheduler is None:
            return optimizer
        if self.scheduler == "plateau":
            plateau = schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.1)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"},
            }
        size = 3 if self.scheduler == "step" else 1
        decay = schedulers.StepLR(optimizer, step_size=size, gamma=0.7)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": decay, "interval": self.scheduler},
        }


class SupervisedModule(lp.LightningModule):
    """The steps all models here share: a loss of the forward's result, and what is logged.

    Args:
        optimizer: the optimizer and its scheduler.
        signature, loss: as in :class:`ModelSpec`.
    """

    def __init__(
        self,
        optimizer: OptimizerSpec | None = None,
        signature: str = "positional",
        loss: str = "regression",
    ) -> None:
        super().__init__()
        self.optimizer_spec = optimizer or OptimizerSpec()
        self.signature = signature
        self.loss = loss

    def call_forward(self, inputs: tuple[Tensor, ...]) -> Any:
        """Calls the forward in the way its signature asks for."""
        args, kwargs = arguments(self.signature, inputs)
        return self(*args, **kwargs)

    def step_loss(self, batch: tuple[tuple[Tensor, ...], Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The loss of a batch, summed over the outputs; and the outputs."""
        inputs, target = batch
        outputs = flatten(self.call_forward(inputs))
        losses = [_LOSSES[self.loss](out, target) for out in outputs]
        return torch.stack(losses).sum(), outputs

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, _ = self.step_loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, outputs = self.step_loss(batch)
        self.log("val_loss", loss)
        self.log_dict({"val_size": outputs[0].abs().mean(), "val_twice": 2 * loss}, on_epoch=True)

    def configure_optimizers(self) -> Any:
        return self.optimizer_spec.configure(list(self.parameters()))


_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "regression": nn.functional.mse_loss,
    "classification": lambda out, target: nn.functional.cross_entropy(out, target.argmax(1)),
}


class BranchyModel(SupervisedModule):
    """The model that a :class:`ModelSpec` describes."""

    def __init__(self, spec: ModelSpec, optimizer: OptimizerSpec | None = None) -> None:
        super().__init__(optimizer, spec.signature, spec.loss)
        self.spec = spec
        self.make_layers()

    def make_layers(self) -> None:
        """Draws all parameters."""
        spec = self.spec
        torch.manual_seed(spec.seed)
        self.entries = nn.ModuleList(nn.Linear(INPUT_WIDTHS[i], WIDTH) for i in inputs_of(spec))
        self.scales = nn.ParameterDict()
        for position, node in enumerate(spec.nodes, start=spec.num_inputs):
            self._add_layer(position, node)
        self.heads = nn.ModuleList(
            nn.Linear(WIDTH, NUM_TARGETS) for _ in range(1 + len(spec.extra_reads))
        )

    def _add_layer(self, position: int, node: Node) -> None:
        if node.kind == "scale":
            self.scales[f"s{position}"] = nn.Parameter(1 + torch.rand(WIDTH) / 4)
        layer = _layer(node)
        if layer is not None:
            self.add_module(f"node_{position}", layer)
        if node.kind == "tied":
            # In and out have the same width, so the weight of any linear node fits.
            layer.weight = self.get_submodule(f"node_{node.reuses}").weight

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inputs = uncall(self.signature, args, kwargs)
        return self._outputs([entry(x) for entry, x in zip(self.entries, inputs, strict=True)])

    def _outputs(self, values: list[Tensor], *beside: Tensor) -> Any:
        for position, node in enumerate(self.spec.nodes, start=self.spec.num_inputs):
            reads = [values[i] for i in node.reads]
            if node.kind in HABITS:
                values.append(self.get_submodule(f"node_{position}")(*reads, *beside))
            else:
                values.append(self._evaluate(position, node, reads))
        joined = values[self.spec.unread[0]]
        for position in self.spec.unread[1:]:
            joined = joined + values[position]
        sources = [joined, *(values[position] for position in self.spec.extra_reads)]
        # Bounded, so that training is stable and rounding errors stay small.
        outputs = [head(source.tanh()) for head, source in zip(self.heads, sources, strict=True)]
        return arrange(self.spec.result, outputs)

    def _evaluate(self, position: int, node: Node, reads: list[Tensor]) -> Tensor:
        if node.kind == "again":
            return self.get_submodule(f"node_{node.reuses}")(reads[0])
        if node.kind == "scale":
            return reads[0] * self.scales[f"s{position}"]
        if node.kind == "relu":
            return nn.functional.relu(reads[0])
        if node.kind == "add":
            return (reads[0] + reads[1]) / 2
        if node.kind == "mul":
            return torch.mul(reads[0].tanh(), reads[1].sigmoid())
        layer = self.get_submodule(f"node_{position}")
        return layer(torch.cat(reads, dim=-1)) if node.kind == "cat" else layer(reads[0])


class HabitualModel(BranchyModel):
    """A model with habits (:mod:`helpers.habits`), arguments that may be None, and a decorator.

    A batch's inputs are ``(x, lengths, second, states)``, of which the last two may be None.
    """

    def make_layers(self) -> None:
        super().make_layers()
        self.second = nn.Linear(INPUT_WIDTHS[1], WIDTH)

    def call_forward(self, inputs: tuple[Any, ...]) -> Any:
        x, *others = inputs
        names = ("lengths", "second", "states")
        given = dict(zip(names, others, strict=True))
        if self.signature == "positional":
            return self(*inputs)
        if self.signature == "keyword":
            return self(x, temperature=0.5, **given)
        kept = {name: value for name, value in given.items() if value is not None}
        return (
            self(x=x, **kept) if self.signature == "dict" else self(x, kept.pop("lengths"), **kept)
        )

    def forward(
        self,
        x: Tensor,
        lengths: Tensor,
        second: Tensor | None = None,
        states: tuple[Tensor, Tensor] | None = None,
        *,
        temperature: float | None = None,
    ) -> Any:
        value = self.entries[0](x) * (temperature or 1.0)
        if second is not None:
            value = value + self.second(second)
        if states is not None:
            value = value * states[0] + states[1]
        return self._outputs([value], lengths)


class DecoratedModel(HabitualModel):
    """The same; what its forward is given goes through decorators."""

    @logged
    @with_default("temperature", 0.5)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class ByModeModel(HabitualModel):
    """The same; in training its forward has an operator more than in evaluation."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        return pytree.tree_map(torch.tanh, outputs) if self.training else outputs


class LateBranchyModel(BranchyModel):
    """The same, made in ``configure_model``, and with weights that are changed once all are."""

    def make_layers(self) -> None:
        """Nothing yet."""

    def configure_model(self) -> None:
        if not hasattr(self, "entries"):
            super().make_layers()
            self.apply(self._stretch)

    def _stretch(self, part: nn.Module) -> None:
        if isinstance(part, nn.Linear):
            nn.init.orthogonal_(part.weight)


def inputs_of(spec: ModelSpec) -> range:
    """Positions of the inputs."""
    return range(spec.num_inputs)


def _layer(node: Node) -> nn.Module | None:
    if node.kind in HABITS:
        return HABITS[node.kind]()
    if node.kind in ("linear", "tied"):
        return nn.Linear(WIDTH, WIDTH)
    if node.kind == "mlp":
        return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
    if node.kind == "norm":
        return nn.LayerNorm(WIDTH)
    if node.kind == "tanh":
        return nn.Tanh()
    if node.kind == "gelu":
        return nn.GELU()
    if node.kind == "cat":
        return nn.Linear(len(node.reads) * WIDTH, WIDTH)
    return None


def arguments(signature: str, inputs: tuple[Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments by which a forward of that signature gets its inputs."""
    if signature == "dict":
        return ({f"view_{i}": x for i, x in enumerate(inputs)},), {}
    if signature == "tuple":
        return (tuple(inputs),), {}
    if signature == "keyword":
        return inputs[:1], {f"extra_{i}": x for i, x in enumerate(inputs[1:])}
    return tuple(inputs), {}


def uncall(signature: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The inputs, from what :func:`arguments` made."""
    if signature == "dict":
        return list(args[0].values())
    if signature == "tuple":
        return list(args[0])
    return [*args, *kwargs.values()]


def arrange(result: str, outputs: list[Tensor]) -> Any:
    """The outputs in the form that the model returns."""
    if result == "single" and len(outputs) == 1:
        return outputs[0]
    if result == "dict":
        return {f"out_{i}": out for i, out in enumerate(outputs)}
    if result == "nested":
        return {"main": outputs[0], "rest": [tuple(outputs[1:])]}
    return tuple(outputs)


def flatten(result: Any) -> list[Tensor]:
    """The tensors in a model's result, in order."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(result) if leaf is not None]


@st.composite
def model_specs(draw: st.DrawFn, max_nodes: int = 8) -> ModelSpec:
    """Random models: forks, joins, skips, shared tensors, shared and tied weights."""
    num_inputs = draw(st.integers(1, 3))
    nodes: list[Node] = []
    linear: list[int] = []
    for position in range(num_inputs, num_inputs + draw(st.integers(2, max_nodes))):
        node = draw(_nodes(position, linear))
        if node.kind == "linear":
            linear.append(position)
        nodes.append(node)
    positions = st.integers(0, num_inputs + len(nodes) - 1)
    extra = tuple(draw(st.lists(positions, max_size=2)))
    return ModelSpec(
        num_inputs=num_inputs,
        nodes=tuple(nodes),
        extra_reads=extra,
        signature=draw(st.sampled_from(["positional", "keyword", "dict", "tuple"])),
        result=draw(st.sampled_from(["single", "tuple", "dict", "nested"])),
        loss=draw(st.sampled_from(["regression", "classification"])),
        seed=draw(st.integers(0, 99)),
    )


@st.composite
def habitual_specs(draw: st.DrawFn) -> ModelSpec:
    """Small models, each with a habit or two that a pipeline may stumble over."""
    plain = draw(model_specs(max_nodes=3))
    nodes = [node for node in plain.nodes if max(node.reads) == 0 and node.kind not in REUSE]
    for _ in range(draw(st.sampled_from([1, 1, 2]))):
        reads = draw(st.integers(0, len(nodes)))
        habit = Node(draw(st.sampled_from(sorted(HABITS))), (reads,))
        nodes.append(habit)
    return replace(plain, num_inputs=1, nodes=tuple(nodes), extra_reads=())


@st.composite
def _nodes(draw: st.DrawFn, position: int, linear: list[int]) -> Node:
    kinds = [*UNARY, *JOINS, *JOINS, *(REUSE if linear else ())]
    kind = draw(st.sampled_from(kinds))
    earlier = st.integers(0, position - 1)
    num_reads = {"cat": draw(st.integers(2, 3)), "add": 2, "mul": 2}.get(kind, 1)
    reads = tuple(draw(earlier) for _ in range(num_reads))
    return Node(kind, reads, draw(st.sampled_from(linear)) if kind in REUSE else None)


@st.composite
def optimizer_specs(draw: st.DrawFn) -> OptimizerSpec:
    """SGD with momentum or AdamW, at times with a scheduler and several groups."""
    return OptimizerSpec(
        name=draw(st.sampled_from(["sgd", "adamw"])),
        scheduler=draw(st.sampled_from([None, "step", "epoch"])),
        num_groups=draw(st.integers(1, 2)),
    )
