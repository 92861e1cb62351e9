"""Sends the inputs of the next step while this one runs, where its batch can be read early.

Once the user's step has returned, rank 0 takes the next batch, if workers have it. Its tensors go
out between the gradients of the backward, to the ranks that will read them, which keep them until a
call takes them. Which tensors those are is a guess: the places in the batch at which this step's
call has found its arguments. The call finds out by identity whether they are its arguments,
unchanged; otherwise it sends its own, and what has come is dropped. So a wrong guess costs time,
and nothing else. Autograd counts changes in place. Those that it misses are found by comparing
bits. The first guesses are compared before the call: one such change ends all sending ahead. Later
ones are compared by the device, and the answer is read when it is there: too late for that step, so
a change is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_gpp.common.tensor_places import bits_of, num_changes
from lightning_gpp.common.torch_device import is_accelerator, synchronize
from lightning_gpp.runtime.executor import Run
from lightning_gpp.runtime.payload import tensors_in
from lightning_gpp.strategy.cutting.cutting import call_size, input_slices
from lightning_gpp.strategy.pipeline import Pipeline
from lightning_gpp.strategy.pipelined_run import PipelinedRun
from lightning_gpp.strategy.ranks.messages import SentAhead
from lightning_gpp.strategy.step.loaders import batches_left, placed_batch
from lightning_gpp.strategy.step.pipelined_call import CallBoundary, RankCall

WAITED_FOR = 4
"""So many comparisons are waited for: code that changes a batch does so in nearly every step."""

UNCOUNTED = (
    "inputs are no longer sent ahead: the batch was changed in place in a way that autograd does "
    "not count (through .data, or by a custom kernel). Results are right, but each step waits for "
    "its inputs. Make a new tensor, or change the batch without .data"
)
TOO_LATE = (
    "a batch was changed in place in a way that autograd does not count (through .data, or by a "
    "custom kernel), after its inputs had gone to other ranks: an earlier step was computed with "
    "the old ones. Make a new tensor, or change the batch without .data, and resume from a "
    "checkpoint; with DataLoader(num_workers=0) no inputs are sent ahead"
)


@dataclass(frozen=True, slots=True)
class _Guess:
    """The inputs of a call to come.

    Attributes:
        pipeline: that the call will run on.
        run: sends them; it has their number.
        units: samples of each of the smallest micro-batches.
        inputs: by name, each with its changes in place so far.
        bits: of each, copied when they were sent.
    """

    pipeline: Pipeline
    run: Run
    units: list[int]
    inputs: Mapping[str, tuple[Tensor, int | None]]
    bits: Mapping[str, Tensor]

    def is_right(self, inputs: Mapping[str, Tensor], units: list[int]) -> bool:
        """Whether a call has these inputs."""
        if units != self.units or inputs.keys() != self.inputs.keys():
            return False
        return all(
            tensor is inputs[name] and num_changes(tensor) == count is not None
            for name, (tensor, count) in self.inputs.items()
        )

    def differs(self, device: torch.device) -> Tensor:
        """Whether the inputs have other bits than were sent: a flag, for the device to find out."""
        now = {name: bits_of(tensor) for name, (tensor, _) in self.inputs.items()}
        flags = [(now[name] != known).any().to(device) for name, known in self.bits.items()]
        return torch.stack(flags).any()


class InputsAhead:
    """What rank 0 sends ahead, of the first call of each training step.

    Args:
        run: of this rank.
    """

    def __init__(self, run: PipelinedRun) -> None:
        self._run = run
        self._number = 0
        self._guess: _Guess | None = None
        self._batch: Any = None
        self._call: RankCall | None = None
        self._places: dict[str, int] = {}
        self._is_whole = self._is_over = False
        self._differs: Tensor | None = None
        self._has_differed = torch.tensor(False)
        """Some time after; on the host."""

    def begin(self, batch: Any) -> None:
        """A training step begins."""
        self._batch, self._places = batch, {}

    def is_likely(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call has tensors of the batch, as they are, in a step that this begins."""
        if self._batch is None:
            return False
        leaves = {id(leaf) for leaf in tensors_in([self._batch])}
        return all(id(tensor) in leaves for tensor in tensors_in([*args, *kwargs.values()]))

    def come(
        self, inputs: Mapping[str, Tensor], units: list[int], needs: frozenset[str]
    ) -> SentAhead | None:
        """What was sent ahead, for this call as was guessed; None if there is nothing.

        Args:
            inputs: of the call, by name.
            units: samples of each of the smallest micro-batches.
            needs: inputs that need a gradient.
        """
        if self._batch is None:  # not the first call of a training step
            return None
        places = {id(leaf): place for place, leaf in enumerate(tensors_in([self._batch]))}
        self._batch = None
        if not needs and all(id(tensor) in places for tensor in inputs.values()):
            self._places = {name: places[id(tensor)] for name, tensor in inputs.items()}
        self._is_whole = len(units) == 1
        guess, self._guess = self._guess, None
        if guess is None or not guess.run.is_fed:  # no backward has followed
            return None
        is_right = guess.pipeline is self._run.built and not needs and guess.is_right(inputs, units)
        if is_right and self._is_other(guess):
            rank_zero_warn(UNCOUNTED)
            is_right, self._is_over = False, True
        form = self._run.forms.index(guess.pipeline)
        assert guess.run.ahead is not None, "it sends ahead"
        return SentAhead(guess.run.ahead, form, guess.units, is_right)

    def _is_other(self, guess: _Guess) -> bool:
        """Whether inputs have other bits than were sent, as far as that is known without a wait."""
        device = self._run.device
        differs = guess.differs(device)
        if self._number <= WAITED_FOR or not is_accelerator(device):
            return bool(differs)
        if self._differs is None:
            self._differs = torch.zeros_like(differs)
            self._has_differed = self._has_differed.pin_memory()
        self._differs |= differs  # for good, so that it does not matter when it is read
        self._has_differed.copy_(self._differs, non_blocking=True)
        return False

    def follow(self, call: RankCall) -> None:
        """The call of :meth:`come` runs as this one."""
        self._call = call if self._places else None

    def read(self) -> None:
        """After the user's step: reads the next batch, whose inputs go out in the backward."""
        run, call = self._run, self._call
        self._call = self._batch = None
        if self._is_over or run.train_batches is None:
            return
        has_more = batches_left(run.module.trainer) > 0
        if self._differs is not None:
            if not has_more:
                synchronize(run.device)
            if self._has_differed:
                raise RuntimeError(TOO_LATE)
        if not has_more or call is None or not isinstance(call.run, Run):
            return
        if run.built.executor.staying.names:
            return
        if not run.train_batches.has_next:
            return
        batches = run.train_batches.look_ahead(1, partial(placed_batch, run))
        leaves = tensors_in(batches)
        if len(leaves) <= max(self._places.values()):
            return
        captured, built = run.built.captured, run.built
        inputs = {name: leaves[place] for name, place in self._places.items()}
        num_samples = call_size(captured, inputs)
        if num_samples is None:
            return
        units = [num_samples] if self._is_whole else run.unit_sizes(num_samples)
        sizes = built.call_sizes(units, is_trained=True)
        if input_slices(captured, inputs, sizes) is None:
            return
        self._number += 1
        counted = {name: (tensor, num_changes(tensor)) for name, tensor in inputs.items()}
        bits = {name: bits_of(tensor).clone() for name, tensor in inputs.items()}
        boundary = CallBoundary.of(captured, inputs, sizes)
        call.run.early = built.early_run(self._number, units, boundary)
        self._guess = _Guess(built, call.run.early, units, counted, bits)
