"""The files that a job leaves in its run folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from lightning_gpp.cost import Costs, costs_to_json
from lightning_gpp.graph import ModelGraph, graph_to_json

CONFIG = "config.yaml"
METRICS = "metrics.json"
FILES = (
    *(METRICS, "plan.json", "plan.png", "program.json", "compare.json"),
    *("simulation.json", "graph.json", "costs.json"),
    *("timeline.png", "timeline.html", "refit.json", CONFIG),
)
"""Every file that a job may write, in the order in which a person is told of them."""


def save_config(config: DictConfig, folder: Path) -> None:
    """Writes the resolved configuration, which needs no environment variable to be read again."""
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, folder / CONFIG, resolve=True)


def save_json(data: object, path: Path) -> None:
    """Writes plain data that a person or a script reads; no document that is read back as ours."""
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def save_metrics(metrics: Mapping[str, float], folder: Path) -> None:
    """Writes the numbers that a sweep shows of a job."""
    save_json(metrics, folder / METRICS)


def save_graph(graph: ModelGraph, costs: Costs, folder: Path) -> None:
    """Writes a captured model and what it costs: ``job=plan graph=... costs=...`` reads them."""
    (folder / "graph.json").write_text(graph_to_json(graph), encoding="utf-8")
    (folder / "costs.json").write_text(costs_to_json(costs), encoding="utf-8")


def written_to(folder: Path) -> str:
    """Where the files are, and which.

    >>> written_to(Path("run"))
    'written to run: config.yaml'
    """
    files = [name for name in FILES if name == CONFIG or (folder / name).exists()]
    return f"written to {folder}: {', '.join(files)}"
