"""How long HAP's search takes.

    python benchmarks/hap_search.py            # 64 devices
    python benchmarks/hap_search.py --devices 16

CPU seconds of one core, of one search with shares by speed, export not included. ``plan`` is
everything: searches and shares in turn, without limits of memory and with 16 GB per device; its
step is simulated, with sums of gradients beside the backward.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from hap_machine import hap_cluster, hap_machine
from hap_models import MODELS, hap_graph

from lightning_gpp.spmd.operator_graph import SpmdGraph
from lightning_gpp.spmd.plan import plan_hap
from lightning_gpp.spmd.search.find import find_program
from lightning_gpp.text_table import text_table


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=64)
    count = parser.parse_args().devices
    cluster = hap_cluster().every(64 // count)
    machine = hap_machine(cluster, has_limits=False)
    rows = []
    for name in MODELS:
        graph = hap_graph(name, count)
        start_s = time.process_time()
        found = find_program(graph, machine, machine.speeds.shares)
        rows.append(row(name, graph, "a search", start_s, found.seconds))
        for what, limits in (("plan", False), ("plan, 16 GB", True)):
            start_s = time.process_time()
            plan = plan_hap(graph, hap_machine(cluster, has_limits=limits))
            step_s = plan.evaluation.step_s
            rows.append(row(name, graph, what, start_s, step_s))
    header = ["model", "operators", "what", "CPU s", "step s"]
    print(text_table(header, rows, left=["model", "what"]))


def row(name: str, graph: SpmdGraph, what: str, start_s: float, step_s: float) -> list[str]:
    """A row of the table; ``start_s`` is what the processor's clock said when it began."""
    cpu_s = time.process_time() - start_s
    return [name, str(len(graph.operators)), what, f"{cpu_s:.2f}", f"{step_s:.4f}"]


if __name__ == "__main__":
    main()
