"""A published workload by its name, or a graph from a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lightning_gpp.common.data_file import read_text
from lightning_gpp.common.strict_json import parse_json
from lightning_gpp.cost import graph_work
from lightning_gpp.graph import graph_from_json
from lightning_gpp.jobs.options import as_mapping, as_text
from lightning_gpp.workloads import WORKLOADS, Workload, read_pipedream_profile, read_piper_workload


def workload_of(config: DictConfig) -> Workload:
    """The workload that ``graph`` names, or of a file of any known form.

    Raises:
        ValueError: there is no such model or file, the file is broken, or an option is unknown.
    """
    graph = as_text("graph", config.graph) or ""
    return load_workload(graph, as_mapping("graph_options", config.graph_options))


def load_workload(graph: str, options: Mapping[str, Any] | None = None) -> Workload:
    """A workload by its name, or from a file of any known form.

    Args:
        graph: name in :data:`~lightning_gpp.workloads.WORKLOADS`; or a file: a PipeDream profile
            (``.txt``), an input of Piper, or a model graph of ours (both ``.json``).
        options: of the model or the reader.
    """
    reader = WORKLOADS.get(graph) or partial(_reader(graph), graph)
    known = [
        name
        for name, option in signature(reader).parameters.items()
        if option.default is not Parameter.empty
    ]
    if unknown := [str(name) for name in options or {} if name not in known]:
        raise ValueError(
            f"graph_options of {graph}: unknown option {unknown[0]!r}; expected "
            f"{', '.join(known) or 'none'}"
        )
    return reader(**(options or {}))


def _reader(graph: str) -> Callable[..., Workload]:
    path = Path(graph)
    if not path.is_file():
        raise ValueError(
            f"graph={graph} is neither a file nor a known model ({', '.join(WORKLOADS)}); expected "
            "a PipeDream profile (.txt), an input of Piper or a model graph (.json)"
        )
    if path.suffix != ".json":
        return read_pipedream_profile
    data = parse_json(read_text(path, "an input of Piper or a model graph (JSON)"), graph)
    is_ours = isinstance(data, Mapping) and "format" in data
    return read_graph_file if is_ours else read_piper_workload


def read_graph_file(path: str | Path) -> Workload:
    """A workload of a model graph in our own form; costs are estimated."""
    graph = graph_from_json(read_text(path, "a model graph (JSON)"), source=str(path))
    size = graph.microbatch_size
    return Workload(Path(path).stem, graph, graph_work(graph), size, source=str(path))
