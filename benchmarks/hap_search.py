"""How long HAP's search takes, and what its bound and its blocks save.

    python benchmarks/hap_search.py            # 64 devices
    python benchmarks/hap_search.py --devices 16

CPU seconds of one core, of one search with shares by speed, export not included; expansions are
labels that were continued. ``no bound`` is a uniform-cost search, ``no blocks`` searches every
layer anew: all find the same cost, or this ends in an error. ``plan`` is everything: searches and
shares in turn, without limits of memory and with 16 GB per device; its step is simulated, with sums
of gradients beside the backward.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from hap_machine import hap_cluster, hap_machine
from hap_models import MODELS, hap_graph

from lightning_gpp.spmd.plan import plan_hap
from lightning_gpp.spmd.search.find import SearchOptions, find_program
from lightning_gpp.text_table import text_table

WAYS = {
    "A*, blocks": SearchOptions(),
    "no bound": SearchOptions(has_bound=False),
    "no blocks": SearchOptions(has_blocks=False),
    "neither": SearchOptions(has_bound=False, has_blocks=False),
}


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
        least = math.inf
        for way, options in WAYS.items():
            start = time.process_time()
            found = find_program(graph, machine, (machine.speeds.shares,), options)
            cpu_s = time.process_time() - start
            if not math.isclose(min(least, found.seconds), found.seconds, rel_tol=1e-9):
                raise AssertionError(f"{name}, {way}: {found.seconds}, not {least}")
            least = min(least, found.seconds)
            blocks = f"{found.num_kinds} of {found.num_blocks}" if found.num_blocks else ""
            rows.append(
                [
                    *(name, str(len(graph.operators)), way, blocks),
                    *(str(found.effort.expansions), f"{cpu_s:.2f}", f"{found.seconds:.4f}"),
                ]
            )
        for way, limits in (("plan", False), ("plan, 16 GB", True)):
            start = time.process_time()
            plan = plan_hap(graph, hap_machine(cluster, has_limits=limits))
            cpu_s = time.process_time() - start
            rows.append(
                [
                    *(name, str(len(graph.operators)), way, "", str(plan.expansions)),
                    *(f"{cpu_s:.2f}", f"{plan.evaluation.step_s:.4f}"),
                ]
            )
    header = ["model", "operators", "search", "blocks", "expansions", "CPU s", "step s"]
    print(text_table(header, rows, left=["model", "search"]))


if __name__ == "__main__":
    main()
