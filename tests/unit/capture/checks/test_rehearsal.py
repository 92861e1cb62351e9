"""What a graph is compared on, and what a module shows that does not compute the same twice."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from lightning_gpp.capture import CaptureError, capture, profile_costs


class Alternating(nn.Module):
    """Its output has one row more in every second call; no rollback sees the counter.

    Args:
        phase: of the first call.
        factor: by which the values of every second call differ; the rows stay, if not 1.
    """

    def __init__(self, phase: int, factor: float = 1.0) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(3, 2), factor
        self.turns = itertools.cycle([phase, 1 - phase])

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if not next(self.turns):
            return y
        return torch.cat([y, y[:1]]) if self.factor == 1 else self.factor * y


@pytest.mark.parametrize("phase", [0, 1])
@pytest.mark.parametrize("factor", [1.0, 2.0], ids=["shapes", "values"])
@pytest.mark.parametrize("num_samples", [1, 2, 4])
@pytest.mark.parametrize("is_inner", [False, True])
def test_what_alternates_from_call_to_call_is_refused(
    phase: int, factor: float, num_samples: int, is_inner: bool
) -> None:
    module: nn.Module = Alternating(phase, factor)
    if is_inner:
        module = nn.Sequential(module, nn.Linear(2, 2))
    with pytest.raises(CaptureError, match="cannot be captured"):
        capture(module, (torch.randn(num_samples, 3),))


class _Remembers(nn.Module):
    """Counts, and keeps its last input; may compute with it."""

    def __init__(self, uses: str) -> None:
        super().__init__()
        self.layer, self.uses = nn.Linear(3, 2), uses
        self.num_calls, self.last, self.all = 0, None, []

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.uses == "number":
            y = y / (1 + self.num_calls)
        elif self.uses == "last" and self.last is not None:
            y = y + self.last.mean()
        elif self.uses == "list":
            y = y + sum(self.all)
        self.num_calls += 1
        self.last = x.detach()
        self.all.append(x.detach().mean())
        return y


@pytest.mark.parametrize("uses", ["nothing", "number", "last", "list"])
def test_what_an_earlier_call_left_behind(uses: str) -> None:
    model = _Remembers(uses)
    if uses == "nothing":
        capture(model, (torch.randn(4, 3),))
    else:
        with pytest.raises(CaptureError, match="computes with what an earlier call left in"):
            capture(model, (torch.randn(4, 3),))
    assert model.num_calls == 0 and model.last is None


class _Counted(nn.Module):
    """Counts calls where no rollback sees it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.calls = model, itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        next(self.calls)
        return self.model(x)


@pytest.mark.parametrize("num_samples", [1, 4])
@pytest.mark.parametrize(
    ("model", "most"), [(nn.BatchNorm1d(3), 3), (_Remembers("nothing"), 5), (nn.Linear(3, 3), 3)]
)
def test_forward_runs_once_beside_its_two_traces(
    model: nn.Module, most: int, num_samples: int
) -> None:
    if isinstance(model, nn.BatchNorm1d) and num_samples == 1:
        pytest.skip("needs two samples")
    counted = _Counted(model)
    capture(counted, (torch.randn(num_samples, 3),))
    assert next(counted.calls) <= most


def test_hooks_that_only_look_on_run_in_one_rehearsal_and_in_real_calls() -> None:
    seen: list[str] = []
    model = nn.Sequential(_Counted(nn.Linear(3, 3)), nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].register_forward_hook(lambda *_: seen.append("block"))
    model[1].register_forward_pre_hook(lambda *_: seen.append("layer"))
    model[2].register_forward_hook(lambda module, args, output: output * 2)
    captured = capture(model, (torch.randn(4, 3),))
    assert sorted(seen) == ["block", "layer"]
    assert captured.kept_whole == ("_Counted stays whole: a hook looks at its calls",)
    profile_costs(captured, (torch.randn(4, 3),), num_sizes=1)
    assert sorted(seen) == ["block", "layer"]
    x = torch.randn(2, 3)
    seen.clear()
    names = [item.value.name for item in captured.graph.inputs]
    stage = captured.stage([op.name for op in captured.graph], names, captured.graph.outputs)
    (output,) = stage([x], training=True)
    assert seen == ["block", "layer"]
    assert torch.equal(output, model(x))
