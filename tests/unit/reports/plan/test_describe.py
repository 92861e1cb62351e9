from __future__ import annotations

from dataclasses import replace

from helpers.graphs import literal_graph, profile_of

from lightning_gpp.cluster import Link, uniform_cluster
from lightning_gpp.planner import (
    PlanRequest,
    evaluate_plan,
    plan_request,
    resolve_plan,
)
from lightning_gpp.reports.plan.describe import (
    describe_plan,
)

GRAPH = literal_graph(
    {
        "stem": "x",
        "enc.a": "stem",
        "enc.b": "stem",
        "cat()": "enc.a enc.b",
        "head": "cat()",
    },
    parameters={"head": ["stem.weight", "head.bias"]},
)
PLAN = resolve_plan([["stem"], ["enc.a"], ["enc.b"], ["head", "cat"]], GRAPH)
FREE = Link(1e30)


def question(**options) -> PlanRequest:
    """16 samples in 4 micro-batches of 4, on devices of 12 kB with free links."""
    cluster = uniform_cluster(4, FREE)
    devices = tuple(replace(device, memory_bytes=12_000) for device in cluster.devices)
    return plan_request(
        GRAPH,
        replace(cluster, devices=devices),
        costs=profile_of(GRAPH),
        minibatch_size=16,
        num_microbatches=4,
        **options,
    )


REQUEST = question()
FOUND = evaluate_plan(PLAN, REQUEST)


def lines_of(text: str) -> str:
    """An indented literal without its margin."""
    lines = text.strip("\n").rstrip().split("\n")
    margin = min(len(line) - len(line.lstrip()) for line in lines if line)
    return "\n".join(line[margin:] for line in lines)


def test_the_whole_text():
    """Every operator takes 3 ms and 100 B, and has 1 kB, of which Adam makes 4 kB."""
    assert describe_plan(FOUND, REQUEST, max_width=90) == lines_of("""
        Plan 'manual': 4 stages on 4 devices, depth 3, 4 micro-batches of 4, schedule 1f1b
        Predicted step: 30.0 ms for 16 samples, 533.3 samples/s

                                  sends  micro-      in
        stage  device  operators     to   batch  flight  compute  messages   load  memory
        ─────────────────────────────────────────────────────────────────────────────────
            0       0  stem         1,2       4       3  3.00 ms       0 s   50 %  4.3 kB
            1       1  enc.a          3       4       2  3.00 ms       0 s   50 %  4.2 kB
            2       2  enc.b          3       4       2  3.00 ms       0 s   50 %  4.2 kB
            3       3  head, cat              4       1  6.00 ms       0 s  100 %  8.2 kB

        Bottleneck: stage 3 (device 3) by compute, 1.50 ms per sample.
        Step: 24.0 ms at the bottleneck's pace, and 6.00 ms to fill and drain the pipeline.
        Peak memory: 9.7 kB of 12.0 kB (81 %) on device 3.

        Depth: stages on the longest path. Predicted step: operators and messages, without your
          step, data and optimizer.
        Compute: forward and backward of one micro-batch (measured on cpu).
        Messages: time to send one micro-batch; overlaps with compute.
        Load: compute or messages per sample, whichever is longer, plus the all-reduce, in per
          cent of the busiest stage.
        Memory: parameters, gradients, optimizer state (2 values per parameter) and activations in
          flight, on each device.
    """)


def test_large_outputs_are_told_with_a_remedy():
    """Two towers; the outputs of one go to the device of the other."""
    graph = literal_graph({"a": "x", "b": "x"}, outputs=("a", "b"))
    plan = resolve_plan([["a"], ["b"]], graph)
    for bandwidth, expected in ((1e5, True), (1e12, False)):
        request = plan_request(
            graph,
            uniform_cluster(2, Link(bandwidth)),
            costs=profile_of(graph),
            minibatch_size=16,
            num_microbatches=4,
            schedule="gpipe",
        )
        text = " ".join(describe_plan(evaluate_plan(plan, request), request).split())
        told = (
            "Outputs: 128 B a sample go to your step and gradients back, 22 % of the step; a "
            "forward that returns less (a head or the loss inside of it) saves that."
        )
        assert (told in text) == expected, text
