"""The private names of Lightning that we use are imported in one place."""

from __future__ import annotations

import ast
from pathlib import Path

import lightning_gpp.strategy.lightning_private as private


def test_private_names_are_imported_in_one_place() -> None:
    folder = Path(private.__file__).parent.parent
    for path in folder.rglob("*.py"):
        if path.name == "lightning_private.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning."):
                hidden = [alias.name for alias in node.names if alias.name.startswith("_")]
                hidden += [part for part in (node.module or "").split(".") if part.startswith("_")]
                assert not hidden, f"{path.name} imports {hidden} from {node.module}"
