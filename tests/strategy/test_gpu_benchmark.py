"""``benchmarks/gpu.py`` runs where there is a device, and says so where there is none."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    path = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
    spec = importlib.util.spec_from_file_location("gpu_benchmark", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_without_a_gpu(
    benchmark: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert benchmark.main([]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "There is no GPU here; --device cpu tries the same rows on CPUs."
    ]


def test_the_table(
    benchmark: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPUs; runs of another precision, and of one stage, are taken for those that are made."""
    run, made = benchmark.results, {}

    def results(asked: Any, folder: Path) -> Any:
        name = asked.name.removesuffix("-bf16").replace("one", "plain")
        if name == asked.name:
            made[name] = run(asked, folder)
        else:
            shutil.copytree(folder / name, folder / asked.name)
        return made[name]

    monkeypatch.setattr(benchmark, "results", results)
    status = benchmark.main(["--device", "cpu", "--steps", "14", "--width", "16"])
    text = capsys.readouterr().out
    assert status == 0, text
    rows = text.split("─" * 20)[-1].strip("─\n").splitlines()
    assert len(rows) == 14
    for row in ("two stages, float32", "messages of 4.1 kB", "memory of rank 1", "recorded step"):
        assert row in text
    assert made["plain"][0]["losses"] == pytest.approx(made["two"][0]["losses"], rel=1e-5)


def test_a_failure_is_shown(
    benchmark: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(asked: Any, folder: Path) -> Any:
        raise benchmark.RunFailedError("plain failed:\nout of memory")

    monkeypatch.setattr(benchmark, "results", fail)
    assert benchmark.main(["--device", "cpu"]) == 1
    assert "out of memory" in capsys.readouterr().out
