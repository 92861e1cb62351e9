"""Small files in the formats of PipeDream and Piper, and the shared real ones where they are."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest

DATA = os.environ.get("LIGHTNING_GPP_DATA")
GRAPHS = Path(DATA).parent / "graphs" if DATA else None

IMAGES_BYTES = 10 * 3 * 224 * 224 * 4.0


def _node(name: str, text: str, forward: float, backward: float, size: str, weight: float) -> str:
    times = f"forward_compute_time={forward:.3f}, backward_compute_time={backward:.3f}"
    return f"{name} -- {text} -- {times}, activation_size={size}, parameter_size={weight:.3f}"


PIPEDREAM = "\n".join(
    [
        _node("node1", "Input", 9.0, 0.0, f"{IMAGES_BYTES}", 0.0),
        _node("node2", "Conv2d(3, 8, kernel_size=(3, 3))", 1.5, 3.0, "4000.0", 864.0),
        _node("node3", "LSTM(8, 4)", 2.0, 4.0, "[800.0; 160.0]", 100.0),
        _node("node4", "__getitem__(0)", 0.0, 0.0, "800.0", 0.0),
        _node("node5", "__getitem__(1)", 0.0, 0.0, "160.0", 0.0),
        _node("node6", "Add", 0.1, 0.2, "800.0", 0.0),
        *("\tnode1 -- node2", "\tnode2 -- node3", "\tnode3 -- node4", "\tnode3 -- node5"),
        *("\tnode2 -- node6", "\tnode4 -- node6", ""),
    ]
)
"""Input -> conv -> lstm -> item 0 -> add <- conv; 10 samples."""


def shared_graph(name: str) -> Path:
    """A published file beside the shared data; skips the test where there is none."""
    if GRAPHS is None or not (GRAPHS / name).is_file():
        pytest.skip("needs the published graphs (LIGHTNING_GPP_DATA/../graphs)")
    return GRAPHS / name


def piper_document(num_devices: int = 4, memory_bytes: float = 1e9) -> dict[str, Any]:
    """Three operators a -> b -> c with an edge a -> c too, in milliseconds."""
    nodes = []
    edges = [(0, 1, 1e6), (1, 2, 2e6), (0, 2, 1e6)]
    for number, (name, milliseconds) in enumerate({"a": 3.0, "b": 6.0, "c": 9.0}.items()):
        into = {str(s): 0.0 for s, t, _ in edges if t == number}
        out = {str(t): 0.0 for s, t, _ in edges if s == number}
        plain = {
            "id": "vanilla",
            "timePerSample": milliseconds,
            "parameterSize": 4e6,
            "memoryUsageA": 1e8,
            "memoryUsageB": 8e6,
            "syncTimeFw": into,
            "syncTimeBw": out,
        }
        again = plain | {
            "id": "activation recomp",
            "timePerSample": milliseconds * 4 / 3,
            "memoryUsageA": 1e7,
            "memoryUsageB": 9.8e7,
        }
        nodes.append({"id": number, "name": name, "TMPCs": {"1": [plain, again]}})
    return {
        "maxDevices": num_devices,
        "maxMemoryPerDevice": memory_bytes,
        "bandwidth": 1e10,
        "mbsInBatch": 64,
        "nodes": nodes,
        "edges": [{"sourceId": s, "destId": t, "communicationCost": size} for s, t, size in edges],
    }


def write_piper(path: Path, document: dict[str, Any], *place: Any, value: Any = None) -> Path:
    """Writes a document; with a place (keys and indices) another value stands there."""
    document = copy.deepcopy(document)
    if place:
        target = document
        for key in place[:-1]:
            target = target[key]
        if value is KeyError:
            del target[place[-1]]
        else:
            target[place[-1]] = value
    path.write_text(json.dumps(document))
    return path
