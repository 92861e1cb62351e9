"""Runs of a module, and of captured graphs of it, that leave no trace.

A graph is compared with its module on every sample, in train and in eval mode, gradients in train
mode on the smallest sample only: the operators of a graph are the same for all samples and modes,
autograd derives the backward from them, and a detached or doubled path shows at any size. Whatever
the module computes, it computes once.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_gpp.capture.checks.backwards import (
    Backwards,
    add_up,
    hooked,
    loss_of_rows,
    watched_backwards,
)
from lightning_gpp.capture.checks.check import (
    Result,
    ValuesDifferError,
    compare,
    unchanged_parameters,
)
from lightning_gpp.capture.checks.rollback import (
    Changes,
    keep,
    random_state,
    rollback,
    seed_all,
    set_training,
)
from lightning_gpp.capture.errors import CaptureError
from lightning_gpp.capture.model import CapturedModel
from lightning_gpp.capture.operators.observe import Observation, Observer, observe
from lightning_gpp.capture.tracing.reads import Read, watched_reads
from lightning_gpp.capture.tracing.trace import Trace
from lightning_gpp.capture.values.arguments import Arguments, withhold
from lightning_gpp.capture.values.placed import HostWeights
from lightning_gpp.capture.values.samples import (
    Sample,
    first_sample,
    other_content,
    other_samples,
)
from lightning_gpp.capture.values.structure import map_tensors, tensors_of
from lightning_gpp.common.mapped_tensor import is_mapped

_logger = logging.getLogger(__name__)

MODES = (True, False)
"""Training flags."""
_NUM_SUMS = 4096

_SEED = 20240521  # another than while tracing: numbers drawn then must not be frozen unnoticed


@dataclass(frozen=True, slots=True)
class CheckedPass:
    """One run of a module and of a graph of it.

    Attributes:
        sample: the inputs.
        training: the mode.
        backward: whether gradients are computed.
    """

    sample: Sample
    training: bool
    backward: bool = False

    def __str__(self) -> str:
        mode = "train" if self.training else "eval"
        return f"{mode} mode, {self.sample.num_samples} samples"


class Rehearsal:
    """What a module computes, and what graphs of it do.

    Args:
        module: whose forward.
        args: of it, as examples.
        kwargs: likewise, by name.
        train_modes: training flag in train mode per qualified name; by default as they are.

    Attributes:
        arguments: how they are laid out.
        sample: the given inputs.
        weights: how the module's weights come to the device of the inputs.
        others: inputs of another size that the module may run on, from :meth:`begin` on.
        reads: plain attributes that forward reads; likewise.
        backwards: what it did that a backward goes through; likewise.
        given: what forward returns and changes in train mode with the given inputs; likewise.
        withheld: outputs of forward that are not handed out; likewise.

    Raises:
        CaptureError: there are no samples.
    """

    others: list[Sample]
    reads: list[Read]
    backwards: Backwards
    given: Result
    withheld: list[str]

    def __init__(
        self,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        train_modes: Mapping[str, bool] | None,
    ) -> None:
        self.module, self.arguments = module, Arguments.of(module, args, kwargs)
        names = {name: part.training for name, part in module.named_modules()}
        if train_modes is None:  # those of now, if it is not in evaluation mode
            train_modes = names if module.training else {}
        training = {name: train_modes.get(name, True) for name in names}
        self._flags = {True: training, False: dict.fromkeys(names, False)}
        self._results: dict[CheckedPass, Result] = {}
        self._evaluates_with_gradients = False
        self.sample = first_sample(self.arguments.tensors(args, kwargs))
        if not self.sample.num_samples:
            raise CaptureError(
                "the first batch has no samples, so the model cannot be captured from it: "
                "begin with another batch. Later ones may be empty"
            )
        self.weights = HostWeights(module, self.sample.device)

    def take_samples(self, count: int) -> None:
        """The first samples take the place of the given ones."""
        if count != self.sample.num_samples:
            self.sample = self.sample.sized(count)

    def begin(self) -> None:
        """Finds out what the module computes; with one sample twice if it does not train on one."""
        sample = self.sample
        self.others = list(other_samples(sample))
        is_smallest = all(other.num_samples >= sample.num_samples for other in self.others)
        try:
            watched = watched_reads(self.module), watched_backwards(self.module)
            with watched[0] as self.reads, watched[1] as self.backwards:
                self.given = self.of(CheckedPass(sample, True, backward=is_smallest))
            try:
                self.of(CheckedPass(sample, False))
            except Exception:  # a forward that takes a gradient inside, say
                self._evaluates_with_gradients = True
                self.of(CheckedPass(sample, False))
        except Exception as error:  # of the user's code
            if sample.num_samples > 1 or sample.graphs is not None:
                raise
            self.take_samples(2)
            try:
                self.begin()
            except Exception:
                raise error from None

    @contextmanager
    def in_mode(self, training: bool, seed: int = 0) -> Iterator[Changes]:
        """The module in a mode, whatever it does there taken back."""
        with rollback(self.module) as changes:
            set_training(self.module, self._flags[training])
            seed_all(seed)
            yield changes

    def observed(
        self, trace: Trace, sample: Sample, training: bool, observer: Observer | None = None
    ) -> dict[fx.Node, Observation]:
        """What the nodes of a trace do with a sample."""
        with self.in_mode(training), self.weights.visiting():
            return observe(trace.graph, sample.fresh(), observer or Observer(self.module))

    def of(self, run: CheckedPass) -> Result:
        """What the module computes, maybe with more gradients; raises what it raises."""
        found = self._results.get(replace(run, backward=True)) or self._results.get(run)
        if found is None:
            found = self._results[run] = self._computed(run)
        return found

    def _computed(self, run: CheckedPass) -> Result:
        def forward(tensors: dict[str, Tensor]) -> Any:
            args, kwargs = self.arguments.rebuild(tensors)
            output, self.withheld = withhold(self.module.forward(*args, **kwargs))
            return output

        return self._result(run, forward, watched=True)

    def replayed(self, captured: CapturedModel, run: CheckedPass) -> Result:
        """What a captured graph computes, run as one stage."""
        graph, training = captured.graph, run.training
        names = [item.value.name for item in graph.inputs]
        stage = captured.stage([operator.name for operator in graph], names, graph.outputs)

        def forward(tensors: dict[str, Tensor]) -> Any:
            values = stage([tensors[name] for name in names], training=training)
            return captured.output(dict(zip(graph.outputs, values, strict=True)), training=training)

        return self._result(run, forward)

    def runs(self, other: Sample) -> bool:
        """Whether the module runs on other inputs, in both modes; it need not take every size."""
        backward = other.num_samples < self.sample.num_samples
        # The other way round than with the given ones: what goes by the number of calls shows.
        for run in (CheckedPass(other, False), CheckedPass(other, True, backward)):
            try:
                self.of(run)
            except Exception as error:  # of the user's code
                _logger.info("the model does not run in %s: %s", run, error)
                return False
        return True

    def check_memory(self) -> None:
        """Checks that forward does not compute with what an earlier call left in attributes.

        Raises:
            CaptureError: it does; a pipelined forward runs elsewhere, once for every micro-batch.
        """
        names = self.given.changes.attributes
        if not names or self.sample.device.type == "meta":
            return
        try:
            with torch.enable_grad(), self.in_mode(True, _SEED), self.weights.visiting():
                put_back = keep(self.module, [name for name, _ in self.module.named_buffers()])
                with suppress(Exception):  # it need not take every size
                    # A layer may keep its only graph.
                    self._call(self.sample if self.sample.graphs else other_content(self.sample))
                put_back()
                seed_all(_SEED)
                output = map_tensors(self._call(self.sample), Tensor.detach)
            compare(Result(self.given.output, {}), Result(output, {}), "a second call")
        except Exception as error:  # of the user's code as well, by what is left
            if isinstance(error, ValuesDifferError) and not error.is_large:
                return
            raise CaptureError(
                f"forward computes with what an earlier call left in {', '.join(names)}: a "
                "pipelined forward runs elsewhere, once for every micro-batch. Give it as an "
                "argument and return it, or make it a buffer (register_buffer)"
            ) from None

    def meets_in_backward(self) -> str | None:
        """Where gradients of samples may meet that forward keeps apart; None if nowhere."""
        if (hook := self.backwards.hook or hooked(self.module)) is not None:
            return hook
        function, sample = self.backwards.function, self.sample
        if function is None:
            return None
        if sample.graphs is None and sample.num_samples > 1:
            try:
                is_apart = add_up(sample.num_samples, self._gradients_of_rows)
            except Exception:  # of the user's code
                is_apart = False
            if is_apart:
                return None
        return f"gradients of samples may meet in the backward of {function}"

    def _call(self, sample: Sample) -> Any:
        args, kwargs = self.arguments.rebuild(sample.fresh())
        return withhold(self.module.forward(*args, **kwargs))[0]

    def _gradients_of_rows(self, rows: Tensor) -> dict[str, Tensor]:
        """Of a sum over some samples, in evaluation mode, where nothing is drawn."""
        with torch.enable_grad(), self.in_mode(False, _SEED), self.weights.visiting():
            for parameter in self.module.parameters():
                parameter.grad = None  # rollback puts it back
            output = self._call(self.sample.of(rows))
            loss_of_rows(output, rows, self.sample.num_samples).backward()  # type: ignore[no-untyped-call]
            parameters = self.module.named_parameters()
            return {name: item.grad for name, item in parameters if item.grad is not None}

    def check(self, captured: CapturedModel, second: Sample | None) -> None:
        """Compares a graph with the module, in both modes.

        On a device that may differ from run to run by more than rounding itself: kernels add up in
        any order, in half precision (backwards of fused attention).

        Args:
            captured: the graph.
            second: inputs of another size, if there are such.

        Raises:
            CaptureError: they are not the same.
        """
        samples = [self.sample] if second is None else [self.sample, second]
        smallest = min(samples, key=lambda each: each.num_samples)
        for mode, sample in itertools.product(MODES, samples):
            run = CheckedPass(sample, mode, backward=mode and sample is smallest)
            try:
                compare(self.of(run), self.replayed(captured, run), str(run))
            except ValuesDifferError as error:
                if error.is_large or sample.device.type == "cpu":
                    raise
                try:
                    compare(self._computed(run), self._computed(run), str(run))
                except ValuesDifferError:
                    continue
                raise

    def _result(
        self,
        run: CheckedPass,
        forward: Callable[[dict[str, Tensor]], Any],
        *,
        watched: bool = False,
    ) -> Result:
        module, weights = self.module, self.weights
        with (
            torch.set_grad_enabled(run.training or self._evaluates_with_gradients),
            self.in_mode(run.training, _SEED) as changes,
            unchanged_parameters(module),
        ):
            inputs = run.sample.fresh()
            # a view, so that an in-place change is as legal as for an input that some layer made
            views = {name: t.view_as(t) if t.requires_grad else t for name, t in inputs.items()}
            before = random_state(run.sample.device)
            with weights.visiting(watched=watched):
                output = forward(views)
            draws = not torch.equal(before, random_state(run.sample.device))
            gradients = self._gradients(output, inputs) if run.backward else {}
            output = map_tensors(output, Tensor.detach)
            buffers = {name: item.detach().clone() for name, item in module.named_buffers()}
        return Result(output, gradients, buffers, changes, draws)

    def _gradients(self, output: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        """Of parameters and inputs, after a backward from all of the output.

        Of those of parameters in files sums are given: memory and disk have no room for them all.
        """
        sums: dict[Tensor, Tensor] = {}

        def condense(parameter: Tensor) -> None:
            if parameter.grad is not None and parameter.grad.layout is torch.strided:
                found = _weighted_sums(parameter.grad)  # once per use where weights visit a device
                sums[parameter] = sums[parameter] + found if parameter in sums else found
                parameter.grad = None

        handles = []
        for parameter in self.module.parameters():
            parameter.grad = None  # rollback puts it back
            if parameter.requires_grad and is_mapped(parameter):
                hook: Any = parameter.register_post_accumulate_grad_hook
                handles.append(hook(condense))
        loss = _any_loss(output)
        try:
            if loss is not None and torch.is_grad_enabled():
                with self.weights.visiting():
                    loss.backward()  # type: ignore[no-untyped-call]
        finally:
            for handle in handles:
                handle.remove()
        sources = dict(self.module.named_parameters()) | dict(inputs)
        return {
            name: sums.get(item, item.grad) for name, item in sources.items() if item.requires_grad
        }


def _weighted_sums(tensor: Tensor) -> Tensor:
    """Sums of pieces of a tensor, as large as its values, in which every element weighs its own."""
    pieces = torch.split(tensor.reshape(-1), -(-tensor.numel() // _NUM_SUMS))
    generator = torch.Generator().manual_seed(0)
    weights = (torch.rand(len(pieces[0]), generator=generator) + 0.5).to(tensor)
    weights /= len(weights) ** 0.5
    return torch.stack([piece @ weights[: len(piece)] for piece in pieces])


def _any_loss(output: Any) -> Tensor | None:
    """A scalar that depends on every element of the output in a different way."""
    generator = torch.Generator().manual_seed(0)
    loss = None
    for leaf in tensors_of(output):
        if leaf.requires_grad:
            weights = torch.empty_like(leaf)
            if not leaf.is_meta:
                weights = torch.rand(leaf.shape, generator=generator, dtype=torch.float64) + 0.5
            term = (leaf * weights.to(leaf)).sum()
            term = term.abs() if term.is_complex() else term
            loss = term if loss is None else loss + term.to(loss)
    return loss
