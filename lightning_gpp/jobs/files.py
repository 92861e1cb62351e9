"""The files that a job leaves in its run folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from lightning_gpp.cost import Costs, costs_to_json
from lightning_gpp.graph import ModelGraph, graph_to_json


def save_config(config: DictConfig, folder: Path) -> None:
    """Writes the resolved configuration, which needs no environment variable to be read again."""
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, folder / "config.yaml", resolve=True)


def save_json(data: object, path: Path) -> None:
    """Writes plain data that a person or a script reads; no document that is read back as ours."""
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def save_metrics(metrics: Mapping[str, float], folder: Path) -> None:
    """Writes the numbers that a sweep shows of a job."""
    save_json(metrics, folder / "metrics.json")


def save_graph(graph: ModelGraph, costs: Costs, folder: Path) -> None:
    """Writes a captured model and what it costs: ``job=plan graph=... costs=...`` reads them."""
    (folder / "graph.json").write_text(graph_to_json(graph), encoding="utf-8")
    (folder / "costs.json").write_text(costs_to_json(costs), encoding="utf-8")


def written_to(folder: Path) -> str:
    """Where the files are, and which; a folder ends with a slash."""
    names = sorted(path.name + "/" * path.is_dir() for path in folder.glob("[!.]*"))
    return f"written to {folder}{': ' if names else ''}{', '.join(names)}"
