"""Replaces the divided forward on rank 0 while the user's step runs.

A call goes to all ranks with the whole batch. A call of a new form (sizes, modes, what needs a
gradient) is exported first, here alone, so that a forward that cannot be captured is an ordinary
error of the user's step.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_gpp.capture.checks.backwards import watched_backwards
from lightning_gpp.capture.checks.check import is_autocast
from lightning_gpp.capture.checks.rollback import set_training
from lightning_gpp.capture.errors import raised_location
from lightning_gpp.capture.tracing.frozen import Frozen
from lightning_gpp.capture.tracing.reads import watched_reads
from lightning_gpp.common.instance_attribute import taken_away
from lightning_gpp.runtime.collectives import ProcessCollectives
from lightning_gpp.runtime.pieces import Slices
from lightning_gpp.spmd.operator_graph import SpmdGraph
from lightning_gpp.spmd.program import Computation, SpmdProgram
from lightning_gpp.spmd.run.export import CallForm, ExportedForward, ExportError, export_forward
from lightning_gpp.spmd.run.moves import Shards
from lightning_gpp.spmd.run.operator_calls import is_random, written_buffers
from lightning_gpp.strategy.pipelined_run import PipelinedRun, modes_of
from lightning_gpp.strategy.ranks.messages import Autocast, Build
from lightning_gpp.strategy.report import waiting_for
from lightning_gpp.strategy.spmd.planners import ProgramPlanner, planner_for
from lightning_gpp.strategy.spmd.sharded import ShardedOptimizer, ShardedPartition
from lightning_gpp.strategy.spmd.spmd_model import ProgramPackage, SpmdForward, SpmdModel
from lightning_gpp.strategy.state.held_elsewhere import lifted
from lightning_gpp.strategy.step.forward_calls import ForwardCalls
from lightning_gpp.strategy.step.pipelined_call import CallBoundary

NO_AUTOCAST = (
    "strategy='hap' exports operators with fixed dtypes, which autocast would change; use "
    "precision='bf16-true' or '16-true', or strategy='graphpipe'"
)


@dataclass(frozen=True, slots=True)
class _Known:
    """An export that all ranks have.

    Attributes:
        number: of it.
        form: of arguments and results.
        outputs: names of the tensors among the results, in order.
        is_random: whether it draws random numbers.
        frozen: what the forward read and went through.
    """

    number: int
    form: CallForm
    outputs: tuple[str, ...]
    is_random: bool
    frozen: Frozen


def call_key(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
    """Equal for two calls exactly if one export serves both.

    Args:
        module: whose forward is called.
        args: of the call.
        kwargs: likewise, by name.
    """
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    return (
        torch.is_grad_enabled(),
        tuple(part.training for part in module.modules()),
        tuple(parameter.requires_grad for parameter in module.parameters()),
        str(structure),
        *(
            (tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
            if isinstance(leaf, Tensor)
            else (type(leaf).__name__, repr(leaf))
            for leaf in leaves
        ),
    )


class SpmdCalls(ForwardCalls):
    """Divides the model of a run, and replaces its forward on rank 0.

    Args:
        run: of this rank.
        shares: part of every device; None for equal ones.
    """

    def __init__(self, run: PipelinedRun, shares: Sequence[float] | None) -> None:
        super().__init__(run)
        num_ranks = run.control.num_ranks
        self._group = ProcessCollectives(run.settings.timeout_s, run.device, run.waits)
        self._planner: ProgramPlanner | None = None
        self._has_shares = shares is not None
        self._shares = tuple(shares or (1 / num_ranks,) * num_ranks)
        self._exports: dict[Hashable, _Known] = {}
        self._tentative: Hashable = None
        """The key of a training call that one in evaluation has led to; it may come otherwise."""
        self._has_trained = False

    def prepare(self, planner: str | ProgramPlanner) -> None:
        """All ranks time what they are to do; rank 0 has a planner afterwards, if it is named."""
        if isinstance(planner, str):
            self._planner = planner_for(self._run, self._group, planner, self._has_shares)
        else:
            self._planner = planner

    def build(self, package: ProgramPackage | None) -> None:
        """All ranks: takes an export over from rank 0, which gives it."""
        run = self._run
        shared: ProgramPackage = run.control.share(package, "waiting for rank 0's program")
        if self._model is not None:
            self._model.add(shared)
            return
        with torch.inference_mode(False):  # what moves would be inference tensors
            self._divide(shared)

    def _divide(self, package: ProgramPackage) -> None:
        """The module's parameters become this rank's parts."""
        run, program, prefix = self._run, package.program, self._run.settings.prefix
        names = [n for n, _ in (*run.target.named_parameters(), *run.target.named_buffers())]
        storage = {prefix + name: program.stored(name) for name in names}
        shards = Shards(program.shares)
        partition = ShardedPartition(run.module, storage, shards, run.control, run.device)
        model = SpmdModel(partition, self._group, prefix)
        model.add(package)
        run.take(
            model,
            ShardedOptimizer,
            [prefix + name for name in written_buffers(package.graph)],
        )
        model.optimizers = run.partial_optimizers

    @property
    def _model(self) -> SpmdModel | None:
        return self._run.model if isinstance(self._run.model, SpmdModel) else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What forward returns.

        Raises:
            NotImplementedError: it is called under autocast.
        """
        run = self._run
        self.before()
        if is_autocast():
            raise NotImplementedError(NO_AUTOCAST)
        if self._model is not None:
            self._model.partition.agree_on_gradients()
        is_trained = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        with torch.set_grad_enabled(is_trained):
            known = self._known(args, kwargs)
        known.frozen.check()
        inputs = known.form.inputs(args, kwargs)
        if is_trained and not self._has_trained:
            self._has_trained = True
            self._warn_if_undivided(known.number, inputs)
        needs = frozenset(n for n, t in inputs.items() if t.requires_grad and is_trained)
        message = SpmdForward(
            self._num_calls if is_trained else None,
            [1],
            run.target.training,
            needs,
            Autocast.current(run.device),
            export=known.number,
            seed=int(torch.randint(2**31, ())) if known.is_random else 0,
        )
        leaves = {n: tensor.detach().requires_grad_(n in needs) for n, tensor in inputs.items()}
        boundary = CallBoundary([leaves], [1], dict.fromkeys(inputs, Slices(None)), {})
        values = self._led(message, boundary, inputs)
        return known.form.result([values[name] for name in known.outputs])

    def _known(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Known:
        """The export for a call; made, and given to all ranks, if there is none yet."""
        run = self._run
        key = call_key(run.target, args, kwargs)
        if key == self._tentative:
            self._tentative = None
            if not self._exports[key].frozen.is_as_read():
                del self._exports[key]
        if key not in self._exports:
            run.stop_early_modules()  # or the export would contain how they move
            plain = pytree.tree_map(_out_of_inference, (args, kwargs))
            is_fit = run.module.trainer.state.fn == TrainerFn.FITTING
            if self._model is None and is_fit and not torch.is_grad_enabled():
                with self._in_training():
                    self._tentative = call_key(run.target, *plain)
                    self._exports[self._tentative] = self._exported(*plain)
            if key not in self._exports:
                self._exports[key] = self._exported(*plain)
        return self._exports[key]

    @contextmanager
    def _in_training(self) -> Iterator[None]:
        """How parameters are stored is for training, which may begin with a validation."""
        run, modes = self._run, modes_of(self._run.target)
        try:
            set_training(run.target, run.train_modes)
            with torch.enable_grad():
                yield
        finally:
            set_training(run.target, modes)

    def _exported(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Known:
        """Exports a call, plans it, and gives it to all ranks."""
        run, number = self._run, 0 if self._model is None else len(self._model.interpreters)
        with watched_reads(run.target, in_layers=True) as reads:
            exported = self._export(args, kwargs)
        graph = exported.graph
        package = ProgramPackage(graph, exported.constants, self._plan(graph))
        with run.control.together():
            run.lead(Build(Autocast.current(run.device)))
            self.build(package)
        run.leader_state.look_again()
        has_random = any(map(is_random, graph.operators))
        frozen = Frozen(run.target, reads)
        return _Known(number, exported.form, graph.outputs, has_random, frozen)

    def _export(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedForward:
        run, has_grad = self._run, torch.is_grad_enabled()  # leaving inference mode turns it on
        with (
            waiting_for("Capturing the model", run.module),
            taken_away(run.target, "forward", self.inner),
            lifted(),
            torch.inference_mode(False),
            torch.set_grad_enabled(has_grad),
            torch.autocast(run.device.type, enabled=False),
            watched_backwards(run.target) as backwards,
        ):
            try:
                exported = export_forward(run.target, args, kwargs)
            except ExportError as error:
                where = raised_location(error.__cause__ or error)
                raise ExportError(f"{where}: {error}") from None  # which says what torch said
        if has_grad and (why := backwards.described(run.target)) is not None:
            raise ExportError(
                f"{why}, which strategy='hap' would lose, as its operators have torch's own "
                "gradients. Use strategy='graphpipe', or write the forward with operators of torch"
            )
        return exported

    def _plan(self, graph: SpmdGraph) -> SpmdProgram:
        """A program for an export; parameters stay stored as they are."""
        model, parts = self._model, None
        if model is not None:
            prefix, stored = model.prefix, model.partition.storage
            parts = {n.removeprefix(prefix): p for n, p in stored.items() if n.startswith(prefix)}
        assert self._planner is not None, "rank 0 has one since the setup"
        with waiting_for("Planning", self._run.module):
            program = self._planner(graph, self._shares, parts)
        if parts is None:
            self._shares = program.shares
        elif parts and program.shares != self._shares:
            raise RuntimeError(
                f"the planner returned shares {program.shares}, but parameters are already divided "
                f"by {self._shares}; give shares="
            )
        return program

    def _warn_if_undivided(self, export: int, inputs: Mapping[str, Tensor]) -> None:
        """Says so where the first training step's batch is not divided."""
        assert self._model is not None
        program, num = self._model.interpreters[export][0].program, len(self._shares)
        computed = [i for i in program.instructions if isinstance(i, Computation)]
        if num > 1 and not any(p.is_shard for each in computed for p in each.outputs):
            rows = min((len(each) for each in inputs.values() if each.dim()), default=num)
            why = f"the batch has only {rows} rows"
            if rows >= num:
                why = "messages between devices would take longer than dividing saves"
            rank_zero_warn(
                f"the program divides nothing, so each of {num} devices computes all of it: {why}. "
                "Use a larger batch, or one device"
            )


def _out_of_inference(leaf: Any) -> Any:
    """Tensors of inference mode cannot be captured; only the form of arguments counts here."""
    if isinstance(leaf, Tensor) and leaf.is_inference():
        with torch.inference_mode(False):
            return torch.empty(leaf.shape, dtype=leaf.dtype)
    return leaf
