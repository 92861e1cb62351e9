"""Costs of a plan cut the gradients of replicas into the sums that the runtime makes of them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from lightning_gpp import graph as model
from lightning_gpp.cluster import BUCKET_BYTES, uniform_cluster
from lightning_gpp.planner import Plan, Stage
from lightning_gpp.planner.make_plan import plan_request
from lightning_gpp.runtime import sums
from lightning_gpp.simulate.plan_costs import program_costs

BIG, SMALL = BUCKET_BYTES, BUCKET_BYTES // 12 * 4


@pytest.mark.parametrize(
    "operators",
    [
        [[BIG, SMALL], [BIG, SMALL]],
        [[SMALL, BIG, BIG, SMALL, BIG]],
        [[SMALL] * 5, [], [SMALL], [BIG], [SMALL] * 4],
    ],
)
def test_sums_of_a_plan_are_those_of_the_runtime(operators: list[list[int]]):
    result = (model.TensorSpec((1, 4), "float32", 0),)
    sizes = {
        f"o{number}.w{index}": size
        for number, own in enumerate(operators)
        for index, size in enumerate(own)
    }
    graph = model.ModelGraph(
        (model.GraphInput(model.Value("v-1", result)),),
        tuple(
            model.OpNode(
                f"o{number}",
                "torch.add",
                "",
                (f"v{number - 1}",),
                (model.Value(f"v{number}", result),),
                tuple(name for name in sizes if name.startswith(f"o{number}.")),
            )
            for number in range(len(operators))
        ),
        (f"v{len(operators) - 1}",),
        tuple(model.Parameter(name, size, name != "o0.w1") for name, size in sizes.items()),
    )
    names = tuple(operator.name for operator in graph)
    plan = Plan((Stage(0, names, (0, 1), microbatch_multiple=2),), num_microbatches=2)
    costs = program_costs(plan, plan_request(graph, uniform_cluster(2), minibatch_size=2))

    trained = {
        name: Parameter(torch.empty(size // 4, device="meta"))
        for name, size in sizes.items()
        if name != "o0.w1"
    }
    cut = [sum(p.nbytes for p in bucket.values()) for bucket in sums._cut(trained)]
    assert [bucket.size_bytes for bucket in costs.buckets] == [float(size) for size in cut]
    ready = [bucket.ready_fraction for bucket in costs.buckets]
    assert ready == sorted(ready)
