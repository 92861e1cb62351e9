"""The shortest step of all plans of a small model, by evaluating every one.

No stated space and no approximation: any convex division, any last stage and
numbering (the feed serves stages in the order of their numbers), replicas in powers of two
of one kind of device, every micro-batch size, shares or turns, every placement; each judged by
``evaluate_plan`` as it is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from helpers.brute_force import REPLICAS, edges_between, orders
from helpers.series_parallel import Stages, Tree, divisions, final_stages
from lightning_gpp.planner import Plan, PlanRequest, Stage, evaluate_plan
from lightning_gpp.planner.best_plan import computing_s


def best_step_s(tree: Tree, request: PlanRequest) -> float:
    """Seconds of the shortest step that fits into memory; infinite if none does."""
    best_s = math.inf
    for plan in _plans(tree, request):
        if computing_s(plan, request) < best_s:
            found = evaluate_plan(plan, request)
            if found.is_feasible:
                best_s = min(best_s, found.step_s)
    return best_s


def _plans(tree: Tree, request: PlanRequest) -> Iterator[Plan]:
    edges = edges_between(request.graph)
    for stages in divisions(tree):
        if len(stages) > request.num_devices:
            continue
        for last in final_stages(tree, stages):
            for order in orders(stages, last, edges):
                for homes in _homes(order, request):
                    yield from _sized(order, homes, request)


def _homes(order: Stages, request: PlanRequest) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Devices of every stage; of those that differ in nothing one."""
    devices = request.cluster.devices
    operators = request.graph.operators
    most = [1 if any(operators[n].state for n in stage) else max(REPLICAS) for stage in order]
    seen = set()
    for counts in itertools.product(REPLICAS, repeat=len(order)):
        if sum(counts) > len(devices) or any(c > m for c, m in zip(counts, most)):
            continue
        for chosen in itertools.permutations(range(len(devices)), sum(counts)):
            ends = list(itertools.accumulate(counts, initial=0))
            homes = tuple(chosen[a:b] for a, b in zip(ends, ends[1:]))
            sites = tuple(tuple((devices[i].kind, devices[i].host) for i in home) for home in homes)
            if any(len({kind for kind, _ in site}) > 1 for site in sites) or sites in seen:
                continue
            seen.add(sites)
            yield homes


def _sized(order: Stages, homes: Sequence[tuple[int, ...]], request: PlanRequest) -> Iterator[Plan]:
    names = [operator.name for operator in request.graph]
    copies = [len(home) for home in homes]
    for size in request.microbatch_sizes:
        count = round(request.minibatch_size / size)
        shared, turns = (
            max(copies) > 1 and not size % max(copies),
            not any(count % c for c in copies),
        )
        ways = [(count, copies)] if turns else []
        if shared:
            ways.append((count * max(copies), [max(copies)] * len(copies)))
        for number, multiples in ways:
            yield Plan(
                tuple(
                    Stage(i, tuple(names[node] for node in sorted(stage)), home, multiple)
                    for i, (stage, home, multiple) in enumerate(zip(order, homes, multiples))
                ),
                "brute force",
                number,
            )
