"""``benchmarks/gpu.py``: its rows, its processes, and what it does where a case fails."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"
OURS = "gpu_benchmark_cases"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script as a module; its processes find the cases beside this file, too."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    yield importlib.import_module("gpu")
    for name in [name for name in sys.modules if name == "gpu" or name.startswith("gpu_")]:
        del sys.modules[name]


def test_without_a_gpu(
    benchmark: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert benchmark.main([]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "There is no GPU here; --device cpu tries the same rows on CPUs."
    ]


@pytest.mark.extra
def test_rows_on_cpus(benchmark: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Two processes train, are compared with plain Lightning, and with their prediction."""
    only = "(difference|recorded step), two stages, staged, float32"
    given = ["--device", "cpu", "--only", only, "--width", "16", "--batch", "16"]
    status = benchmark.main(given)
    text = capsys.readouterr().out
    assert status == 0, text
    equality, recorded = text.splitlines()[-2:]
    found = equality.split("weights ")[1]
    weights, losses = (float(each.split()[0].strip(",")) for each in found.split(", losses "))
    assert max(weights, losses) < 1e-5
    assert recorded.startswith("recorded step, two stages, staged, float32")
    assert "predicted: " in recorded


def place_and_cases(*names: str) -> tuple[Any, list[Any]]:
    module = importlib.import_module("gpu_cases")
    given = [module.Case(f"{n} {i}", f"{OURS}:{n}", {"asked": i}) for i, n in enumerate(names)]
    return module.Place("two", ("cpu", "cpu"), "cpu"), given


@pytest.mark.extra
def test_others_go_on_where_a_case_fails(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.import_module("gpu_processes"), "GRACE_S", 1.0)
    place, cases = place_and_cases("rank", "rank", "fail", "rank")
    ended = list(benchmark.outcomes(place, cases, tmp_path, time.monotonic() + 100))
    assert [case for case, _ in ended] == cases
    one, two, failed, last = (outcome for _, outcome in ended)
    assert [each["rank"] for each in one] == [0, 1]
    assert [each["asked"] for each in (*two, *last)] == [1, 1, 3, 3]
    assert [each["process"] for each in one] == [each["process"] for each in two]
    assert one[0]["process"] != last[0]["process"]
    assert failed.summary == "rank 1: ValueError: out of memory"
    assert "more of it" in failed.text
