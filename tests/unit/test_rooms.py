"""Who may import whom: the table of the architecture, held against the imports in the code."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

EVERYWHERE = {
    *("checks", "strict_json", "data_file", "document_cache", "text_table", "units_of_measure"),
    "_register",
    "_version",
}
ALLOWED = {
    "graph": set(),
    "cluster": {"graph"},
    "cost": {"graph", "cluster"},
    "workloads": {"graph", "cluster", "cost"},
    "schedule": {"graph", "cluster", "cost"},
    "planner": {"graph", "cluster", "cost", "schedule", "workloads"},
    "simulate": {"graph", "cluster", "cost", "schedule", "planner"},
    "reports": {"graph", "cluster", "cost", "schedule", "planner", "simulate"},
    "capture": {"graph", "cost"},
    "runtime": {"graph", "cluster", "schedule", "simulate"},
    "strategy": {
        *("graph", "cluster", "cost", "schedule", "planner", "simulate", "reports"),
        *("capture", "runtime"),
    },
    "recipes": set(),
}
"""Room -> rooms that it may import, itself left out."""

WITHOUT_TORCH = (
    *("graph", "cluster", "cost", "workloads", "schedule", "planner", "simulate", "reports"),
)
WITHOUT_LIGHTNING = (*WITHOUT_TORCH, "capture", "runtime")


def imports(path: Path) -> set[str]:
    """Absolute names that a file imports, at any depth."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:  # others stay in their room
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def files(room: str) -> list[Path]:
    (folder,) = importlib.import_module(f"lightning_gpp.{room}").__path__
    found = sorted(Path(folder).rglob("*.py"))
    assert found, f"no files in {room}"
    return found


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_a_room_imports_only_what_it_may(room: str) -> None:
    allowed = ALLOWED[room] | EVERYWHERE | {room}
    for path in files(room):
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "lightning_gpp" and len(parts) > 1:
                assert parts[1] in allowed, f"{path.name} imports {name}"


@pytest.mark.parametrize("room", WITHOUT_LIGHTNING)
def test_rooms_without_torch_or_lightning(room: str) -> None:
    forbidden = {"lightning", "pytorch_lightning", "hydra", "omegaconf"}
    if room in WITHOUT_TORCH:
        forbidden |= {"torch", "torch_geometric"}
    for path in files(room):
        roots = {name.split(".")[0] for name in imports(path)}
        assert not roots & forbidden, f"{path} imports {roots & forbidden}"


def test_only_the_command_line_knows_hydra() -> None:
    for room in ("strategy", "recipes"):
        for path in files(room):
            assert "hydra" not in {name.split(".")[0] for name in imports(path)}, path


def test_planning_needs_neither_torch_nor_lightning() -> None:
    code = (
        "import sys, lightning_gpp\n"
        "from lightning_gpp import make_plan, Plan, ModelGraph, build_program, simulate\n"
        "from lightning_gpp import read_pipedream_profile, read_piper_workload\n"
        "print([n for n in ('torch', 'lightning', 'numpy', 'matplotlib') if n in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
