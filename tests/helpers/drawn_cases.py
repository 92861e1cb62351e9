"""Cases for :class:`~helpers.random_models.HabitualModel`: batches of several kinds."""

from __future__ import annotations

import random
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import lightning_gpp
from helpers.habits import WIDTH
from helpers.models import DataSpec, targets_of
from helpers.plans import any_plan
from helpers.random_models import (
    INPUT_WIDTHS,
    ByModeModel,
    DecoratedModel,
    HabitualModel,
    ModelSpec,
    OptimizerSpec,
    habitual_specs,
)
from helpers.reference import assert_same_training
from helpers.training import Training, train

PACKAGE = str(Path(lightning_gpp.__file__).parent)


@dataclass(frozen=True)
class BatchKind:
    """What a batch is like.

    Attributes:
        lengths: of its samples: "full" (all the longest), "alike", "falling" or "mixed".
        num_samples: of it.
        second: whether the second argument is there.
        states: whether the tuple is.
    """

    lengths: str = "full"
    num_samples: int = 8
    second: bool = False
    states: bool = False

    def batch(self, generator: torch.Generator, dtype: torch.dtype) -> tuple[Any, Tensor]:
        """Inputs and targets."""
        num = self.num_samples
        x, second = (torch.randn(num, w, generator=generator).to(dtype) for w in INPUT_WIDTHS[:2])
        lengths = torch.full((num,), WIDTH)
        if self.lengths == "alike":
            lengths -= 2
        elif self.lengths != "full":
            lengths = torch.randint(1, WIDTH + 1, (num,), generator=generator)
        if self.lengths == "falling":
            lengths = lengths.sort(descending=True).values
        states = [torch.rand(num, WIDTH, generator=generator).to(dtype) for _ in range(2)]
        inputs = (x, lengths, second if self.second else None, None)
        given = (*inputs[:3], tuple(states) if self.states else None)
        return given, targets_of((x,))


@dataclass(frozen=True)
class KindsSpec(DataSpec):
    """Batches of these kinds, one after the other.

    Attributes:
        kinds: of training's batches.
        later: of validation's.
    """

    kinds: tuple[BatchKind, ...] = ()
    later: tuple[BatchKind, ...] = ()

    def loader(self) -> torch.utils.data.DataLoader[Any]:
        generator = torch.Generator().manual_seed(self.seed)
        dtype = getattr(torch, self.dtype)
        batches: Any = [kind.batch(generator, dtype) for kind in self.kinds]
        return torch.utils.data.DataLoader(batches, batch_size=None)


class KindsTraining(Training):
    """Validates on batches of other kinds."""

    def validation_data(self) -> DataSpec:
        assert isinstance(self.data, KindsSpec)
        return replace(self.data, seed=self.data.seed + 1, kinds=self.data.later)


@dataclass(frozen=True)
class DrawnCase:
    """One training.

    Attributes:
        spec: the model.
        kind: which of them, such as one whose forward goes through decorators.
        kinds: of its batches in training.
        later: in validation, which begins.
        schedule: of the pipeline.
        plan_seed: of the plan.
    """

    spec: ModelSpec
    kind: type[HabitualModel] = HabitualModel
    kinds: tuple[BatchKind, ...] = (BatchKind(), BatchKind("mixed"))
    later: tuple[BatchKind, ...] = (BatchKind("mixed", 5),)
    schedule: str = "gpipe"
    plan_seed: int = 0

    def training(self) -> Training:
        """The training on its batches."""
        data = KindsSpec(kinds=self.kinds, later=self.later)
        build = partial(self.kind, self.spec, OptimizerSpec())
        options = {"inference_mode": False}  # for gradients inside of the forward
        return KindsTraining(build, data, num_steps=len(self.kinds), trainer=options)


@dataclass(frozen=True)
class Outcome:
    """What became of a case.

    Attributes:
        what: "equal", "in one piece", "said to differ", "refused", "wrong", "broken" or, where
            one device does not take it, "invalid".
        text: what was said of it.
        lines: all that was shown.
    """

    what: str
    text: str = ""
    lines: tuple[str, ...] = field(default=())

    @property
    def is_right(self) -> bool:
        """Whether it is as on one device, or was refused or announced."""
        return self.what in ("equal", "in one piece", "said to differ", "refused")

    @property
    def shown(self) -> str:
        """All that is known of it."""
        return "\n".join([self.what, self.text, *self.lines])


def run_case(case: DrawnCase, num_ranks: int = 1) -> Outcome:
    """As this process's rank."""
    training = case.training()
    try:
        expected = train(training, None)
    except Exception as error:
        return Outcome("invalid", repr(error))
    lines: list[str] = []
    try:
        with pytest.MonkeyPatch.context() as patch:
            _with_drawn_plans(patch, case.plan_seed)
            _noting(patch, lines)
            strategy = {"num_microbatches": 4, "timeout": 100.0, "cache": False}
            result = train(training, strategy | {"schedule": case.schedule}, num_ranks)
    except Exception as error:
        what = "refused" if _is_ours(error) else "broken"
        return Outcome(what, "".join(traceback.format_exception(error)), tuple(lines))
    try:
        assert_same_training([result], expected, training.data.dtype)
    except AssertionError as error:
        is_said = any("differ from one device" in line for line in lines)
        return Outcome("said to differ" if is_said else "wrong", str(error), tuple(lines))
    is_whole = any("in one piece" in line for line in lines)
    return Outcome("in one piece" if is_whole else "equal", lines=tuple(lines))


def _is_ours(error: BaseException) -> bool:
    """Whether the package raised it, and did not stumble."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    is_raised = (last.line or "").lstrip().startswith("raise")
    return last.filename.startswith(PACKAGE) and is_raised and len(str(error)) > 30


def _with_drawn_plans(patch: pytest.MonkeyPatch, seed: int) -> None:
    """Plans are drawn, for which nothing has to be measured."""
    from lightning_gpp.strategy.planning import planning

    choose = random.Random(seed)
    patch.setattr(planning, "kept_answer", lambda _, request, __: any_plan(request, choose))
    patch.setattr(planning, "on_all_devices", lambda plan, _: plan)


def _noting(patch: pytest.MonkeyPatch, lines: list[str]) -> None:
    from lightning_gpp.strategy import report
    from lightning_gpp.strategy.step import cut_checks, microbatch_steps

    shown_by = (
        (cut_checks, "show"),
        (microbatch_steps, "rank_zero_warn"),
        (report, "rank_zero_warn"),
    )
    for module, name in shown_by:
        patch.setattr(module, name, lambda text, *_, **__: lines.append(str(text)))


_LENGTHS = ("full", "full", "alike", "falling", "mixed", "mixed")


@st.composite
def _kinds(draw: st.DrawFn, forms: Sequence[tuple[bool, bool]]) -> BatchKind:
    second, states = draw(st.sampled_from(forms))
    num_samples = draw(st.sampled_from([8, 8, 5]))
    return BatchKind(draw(st.sampled_from(_LENGTHS)), num_samples, second, states)


@st.composite
def drawn_cases(draw: st.DrawFn) -> DrawnCase:
    """A model and two to four batches; one in four changes the form of its calls."""
    flags = st.tuples(st.booleans(), st.booleans())
    forms = [draw(flags)]
    if not draw(st.integers(0, 3)):
        forms.append(draw(flags))
    kinds = _kinds(forms)
    return DrawnCase(
        draw(habitual_specs()),
        draw(st.sampled_from([HabitualModel, DecoratedModel, ByModeModel])),
        tuple(draw(st.lists(kinds, min_size=2, max_size=3))),
        tuple(draw(st.lists(kinds, min_size=1, max_size=2))),
        draw(st.sampled_from(["gpipe", "gpipe", "1f1b"])),
        draw(st.integers(0, 999)),
    )
