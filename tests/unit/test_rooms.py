"""Who may import whom: the table of the architecture, held against the imports in the code."""

from __future__ import annotations

import ast
import graphlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
from collections.abc import Mapping, Set
from pathlib import Path

import pytest

import lightning_gpp

EVERYWHERE = {"_version", "common"}
"""What every room may import; they import each other at most."""

DATA = {"graph", "cluster", "cost"}
PLANS = {*DATA, "schedule", "engine", "planner"}
READERS = {*PLANS, "simulate", "reports"}
ALLOWED = {
    **dict.fromkeys(EVERYWHERE, EVERYWHERE),
    "graph": set(),
    "cluster": {"graph"},
    "cost": {"graph", "cluster"},
    "workloads": DATA,
    "schedule": DATA,
    "engine": set(),
    "planner": {*DATA, "schedule", "engine", "workloads"},
    "simulate": PLANS,
    "reports": {*PLANS, "simulate"},
    "capture": {"graph", "cost"},
    "runtime": {"graph", "cluster", "schedule", "simulate"},
    "emulation": {*PLANS, "simulate", "runtime"},
    "weights": set(),
    "gnn": {"graph", "cost", "capture"},
    "spmd": DATA,
    "strategy": {*READERS, "capture", "runtime", "emulation", "weights", "gnn", "spmd"},
    "_register": {"strategy"},
    "jobs": {*READERS, "workloads", "capture", "runtime", "weights", "gnn", "spmd", "strategy"},
    "cli": {"jobs"},
    "recipes": set(),
}
"""Room -> rooms that it may import, itself left out."""

WITHOUT_TORCH = (
    *("graph", "cluster", "cost", "workloads", "schedule", "engine", "planner"),
    *("simulate", "reports"),
)
WITHOUT_LIGHTNING = (*WITHOUT_TORCH, "capture", "runtime", "emulation", "weights", "gnn")


def files(room: str) -> dict[str, Path]:
    """The files of a room or of a single module, by the names of their modules."""
    module = importlib.import_module(f"lightning_gpp.{room}")
    if not hasattr(module, "__path__"):
        assert module.__file__ is not None
        return {module.__name__: Path(module.__file__)}
    (folder,) = module.__path__
    found = {}
    for path in sorted(Path(folder).rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        inner = parts[:-1] if parts[-1] == "__init__" else parts
        found[".".join((module.__name__, *inner))] = path
    assert found, f"no files in {room}"
    return found


def imports(module: str, path: Path) -> set[str]:
    """Absolute names that a file imports, at any depth, also those for types alone."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = module if path.name == "__init__.py" else module.rpartition(".")[0]
            home = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            found |= {f"{home}.{alias.name}" for alias in node.names}
    return found


def all_files() -> dict[str, Path]:
    """Every file of the package, that of the package itself last."""
    assert lightning_gpp.__file__ is not None
    inner = {name: path for room in ALLOWED for name, path in files(room).items()}
    return {**inner, "lightning_gpp": Path(lightning_gpp.__file__)}


def assert_no_circle(successors: Mapping[str, Set[str]]) -> None:
    """Fails with the names of a circle."""
    try:
        graphlib.TopologicalSorter(successors).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_table_has_every_room() -> None:
    """Modules and folders of the package; ``configs`` has no code."""
    found = {module.name for module in pkgutil.iter_modules(lightning_gpp.__path__)}
    assert found | {"recipes"} == set(ALLOWED) | (found & {"configs"})


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_a_room_imports_only_what_it_may(room: str) -> None:
    allowed = ALLOWED[room] | EVERYWHERE | {room}
    for module, path in files(room).items():
        for name in imports(module, path):
            parts = name.split(".")
            if parts[0] == "lightning_gpp":
                assert parts[1] in allowed, f"{path} imports {name}"


def test_rooms_import_each_other_in_one_direction() -> None:
    assert_no_circle({r: ALLOWED[r] - EVERYWHERE for r in ALLOWED.keys() - EVERYWHERE})


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports for types and those inside functions included.

    A name that a package's ``__init__`` hands on is an import of that ``__init__``, which in turn
    imports all files whose names it hands on: a file may not import a package above it by its face.
    That Python runs the ``__init__`` of every package on the way to a module is not counted.
    """
    paths = all_files()
    successors = {
        module: {
            target
            for name in imports(module, path)
            for target in [name if name in paths else name.rpartition(".")[0]]
            if target in paths and target != module
        }
        for module, path in paths.items()
    }
    assert_no_circle(successors)


def test_no_two_classes_share_a_name() -> None:
    homes: dict[str, list[str]] = {}
    for module, path in all_files().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


@pytest.mark.parametrize("room", WITHOUT_LIGHTNING)
def test_rooms_without_torch_or_lightning(room: str) -> None:
    forbidden = {"lightning", "pytorch_lightning", "hydra", "omegaconf"}
    if room in WITHOUT_TORCH:
        forbidden |= {"torch", "torch_geometric"}
    for module, path in files(room).items():
        roots = {name.split(".")[0] for name in imports(module, path)}
        assert not roots & forbidden, f"{path} imports {roots & forbidden}"


def test_spmd_programs_are_planned_without_torch() -> None:
    """Only what runs them, ``spmd.run``, has tensors."""
    for module, path in files("spmd").items():
        if not module.startswith("lightning_gpp.spmd.run"):
            roots = {name.split(".")[0] for name in imports(module, path)}
            inner = [
                name for name in imports(module, path) if name.startswith("lightning_gpp.spmd.run")
            ]
            assert not roots & {"torch", "lightning", "hydra"} and not inner, path


@pytest.mark.parametrize("room", sorted(ALLOWED.keys() - {"cli", "jobs"}))
def test_only_the_command_line_knows_hydra(room: str) -> None:
    for module, path in files(room).items():
        assert "hydra" not in {name.split(".")[0] for name in imports(module, path)}, path


def test_planning_needs_neither_torch_nor_lightning() -> None:
    code = (
        "import sys, lightning_gpp\n"
        "from lightning_gpp import make_plan, Plan, ModelGraph, build_program, simulate\n"
        "from lightning_gpp import read_pipedream_profile, read_piper_workload\n"
        "print([n for n in ('torch', 'lightning', 'numpy', 'matplotlib') if n in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_files_that_the_architecture_names_exist() -> None:
    root = Path(__file__).parents[2]
    package = root / "lightning_gpp"
    text = (root / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.(?:py|md))`", text)
    assert len(named) > 30
    places = (root, package, *package.glob("*/"), package / "strategy" / "step")
    lacking = [name for name in named if not any((place / name).exists() for place in places)]
    assert not lacking
