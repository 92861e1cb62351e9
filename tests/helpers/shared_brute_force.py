"""The shortest step of all plans without replicas whose stages may share devices, by trying all.

Any convex division, any last stage and numbering, any map from stages to devices, every size of
micro-batches (one for all stages); each judged by ``evaluate_plan``. It shares no code with the
search.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from helpers.brute_force import edges_between, orders
from helpers.series_parallel import Tree, divisions, final_stages
from lightning_gpp.planner import Plan, PlanRequest, Stage
from lightning_gpp.planner.step_time.evaluate import evaluate_below


def best_shared_step_s(tree: Tree, request: PlanRequest, at_most_s: float = math.inf) -> float:
    """Seconds of the shortest step that fits into memory; the limit if none is shorter."""
    best_s = at_most_s
    for plan in _plans(tree, request):
        found = evaluate_below(plan, request, best_s)
        if found is not None and found.is_feasible:
            best_s = min(best_s, found.step_s)
    return best_s


def _plans(tree: Tree, request: PlanRequest) -> Iterator[Plan]:
    edges = edges_between(request.graph)
    names = [operator.name for operator in request.graph]
    for stages in divisions(tree):
        for last in final_stages(tree, stages):
            for order in orders(stages, last, edges):
                for homes in _homes(len(order), request):
                    made = tuple(
                        Stage(i, tuple(names[node] for node in sorted(stage)), (home,))
                        for i, (stage, home) in enumerate(zip(order, homes))
                    )
                    for size in request.microbatch_sizes:
                        count = round(request.minibatch_size / size)
                        yield Plan(made, num_microbatches=count)


def _homes(num_stages: int, request: PlanRequest) -> Iterator[tuple[int, ...]]:
    """Devices of every stage; of equal devices the first ones are used first."""
    devices = request.cluster.devices
    sites = [(device.kind, device.host, device.memory_bytes) for device in devices]
    for homes in itertools.product(range(len(devices)), repeat=num_stages):
        seen = [False] * len(devices)
        is_first = True
        for home in homes:
            earlier = [d for d in range(home) if sites[d] == sites[home] and not seen[d]]
            if not seen[home] and earlier:
                is_first = False
                break
            seen[home] = True
        if is_first:
            yield homes
