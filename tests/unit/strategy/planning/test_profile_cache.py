"""Every ingredient of a profile makes another key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_gpp.capture import CapturedModel, capture
from lightning_gpp.common.document_cache import DocumentCache
from lightning_gpp.cost import Costs, OpProfile, Profile
from lightning_gpp.strategy.planning import profile_cache
from lightning_gpp.strategy.planning.profile_cache import profile_key, profiled

CPU = torch.device("cpu")


class Repeated(nn.Module):
    """A leaf that applies its matrix ``times`` times."""

    def __init__(self, width: int = 4, times: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.linear(x)
        return x


class Squared(Repeated):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square()


def captured(
    leaf: nn.Module | None = None,
    *,
    last: nn.Module | None = None,
    num_samples: int = 4,
    dtype: torch.dtype = torch.float32,
    mode: bool = True,
    frozen: bool = False,
) -> CapturedModel:
    module = nn.Sequential(leaf or Repeated(), last or nn.Dropout(0.5)).to(dtype).train(mode)
    module[0].requires_grad_(not frozen)
    width = 4 if leaf is None else leaf.linear.in_features
    x = torch.randn(num_samples, width, dtype=dtype)
    return capture(module, (x,), {}, leaf_modules=[Repeated, Squared])


def test_equal_models_with_other_weights_have_equal_keys():
    assert profile_key(captured(), CPU) == profile_key(captured(), CPU)


@pytest.mark.parametrize(
    "other",
    [
        lambda: captured(Repeated(width=6)),
        lambda: captured(Repeated(times=2)),
        lambda: captured(Squared()),
        lambda: captured(last=nn.Dropout(0.25)),
        lambda: captured(last=nn.ReLU()),
        lambda: captured(dtype=torch.float64),
        lambda: captured(mode=False),
        lambda: captured(frozen=True),
    ],
    ids=["width", "setting", "code", "option", "type", "dtype", "mode", "frozen"],
)
def test_another_model_has_another_key(other: Callable[[], CapturedModel]):
    assert profile_key(other(), CPU) != profile_key(captured(), CPU)


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr("torch.__version__", "9.9"),
        lambda patch: patch.setattr("lightning_gpp._version.__version__", "9.9"),
        lambda patch: patch.setattr(profile_cache, "device_name", lambda device: "other"),
        lambda patch: patch.setattr("platform.node", lambda: "other"),
        lambda patch: patch.setattr("torch.get_num_threads", lambda: 99),
    ],
    ids=["torch", "package", "device", "processor", "threads"],
)
def test_another_place_has_another_key(change, monkeypatch: pytest.MonkeyPatch):
    model = captured()
    before = profile_key(model, CPU)
    change(monkeypatch)
    assert profile_key(model, CPU) != before


class Machine:
    """A machine on which every measurement is as long as the machine is slow.

    Args:
        slowness: of every measurement.
    """

    def __init__(self, *slowness: float) -> None:
        self._slowness = iter(slowness)
        self.num_measured = 0
        self.clock_s = self.thread_s = 0.0

    def measure(self) -> Costs:
        self.num_measured += 1
        now = next(self._slowness)
        self.clock_s, self.thread_s = self.clock_s + now, self.thread_s + 1.0
        return Costs((Profile({"op": OpProfile(now, 2.0, 3, 4.0)}, 4),))

    def costs(
        self, cache: Path | bool, device: torch.device = CPU
    ) -> tuple[float, tuple[str, ...]]:
        """Seconds that were measured, and what is said."""
        with mock.patch.multiple(
            profile_cache.time,
            perf_counter=lambda: self.clock_s,
            thread_time=lambda: self.thread_s,
        ):
            found, notes = profiled(cache, captured(), device, self.measure)
        return found.profiles[0].operators["op"].forward_s, notes


def test_a_profile_is_made_once(tmp_path: Path):
    assert Machine(1.2).costs(tmp_path) == (1.2, ())
    later = Machine()
    seconds, (note,) = later.costs(tmp_path)
    assert seconds == 1.2 and note.startswith("The profile is of an earlier run: ")


def test_a_profile_of_a_busy_machine_is_measured_again_when_it_is_found(tmp_path: Path):
    seconds, (note,) = Machine(2.0).costs(tmp_path)
    assert seconds == 2.0 and "took 2 times as long as it computed" in note
    assert Machine(1.0).costs(tmp_path) == (1.0, ())
    assert Machine().costs(tmp_path)[0] == 1.0


@pytest.mark.parametrize("kept", ["{}", '{"format": "lightning_gpp.co', "null"])
def test_a_broken_profile_is_measured_again(tmp_path: Path, kept: str, caplog):
    documents = DocumentCache(tmp_path)
    documents.write("profile", profile_key(captured(), CPU), kept)
    machine = Machine(1.0)
    assert machine.costs(tmp_path) == (1.0, ())
    assert machine.num_measured == 1 and "is broken and is made again" in caplog.text


def test_without_a_cache_everything_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LIGHTNING_GPP_CACHE", str(tmp_path))
    machine = Machine(1.0, 1.0, 1.0)
    assert machine.costs(False) == machine.costs(False) == (1.0, ())
    assert machine.num_measured == 2 and not list(tmp_path.iterdir())
    machine.costs(True)
    assert len(list(tmp_path.iterdir())) == 1
