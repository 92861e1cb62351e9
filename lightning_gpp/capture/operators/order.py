"""The order in which one process found the nodes, in another that goes through sets otherwise.

Python draws the order of a set of strings anew in every process, so that a forward which goes
through one (ModernBERT computes a table per kind of attention so) calls the same in another order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from torch import fx

from lightning_gpp.capture.errors import CaptureError
from lightning_gpp.capture.operators.fingerprint import NodeContent, node_contents
from lightning_gpp.capture.tracing.trace import Trace


def in_order(traces: Mapping[bool, Trace], nodes: Sequence[NodeContent]) -> dict[bool, Trace]:
    """The traces of both modes with the order and the names of the nodes of another process.

    What nodes did is not known of them: nodes that are alike change memory of their own.

    Args:
        traces: normalized; are left as they are.
        nodes: of its trace in training.

    Raises:
        CaptureError: it has other nodes.
    """
    own = node_contents(traces[True])
    if own == tuple(nodes):
        return dict(traces)
    if Counter(node.content for node in own) != Counter(node.content for node in nodes):
        raise CaptureError(
            "this process captured another model than the one that was checked: all must "
            "build the same model and take the same path through its forward (a set of strings has "
            "another order in every process: go through it sorted)"
        )
    alike = {node.content: node.name for node in own}
    return {mode: _in_order(trace, nodes, alike) for mode, trace in traces.items()}


def _in_order(trace: Trace, nodes: Sequence[NodeContent], alike: Mapping[str, str]) -> Trace:
    """A copy with ``nodes``; in ``alike`` is the name of one of the same content for each."""
    found = {node.name: node for node in trace.graph.nodes}
    graph, copied = fx.Graph(), dict[str, fx.Node]()
    for node in nodes:
        like, reads = found[alike[node.content]], map(copied.__getitem__, node.reads)
        args, kwargs = fx.node.map_arg((like.args, like.kwargs), partial(_next, reads))
        copy = graph.create_node(like.op, like.target, args, kwargs, name=node.name)
        copy.meta.update(like.meta, calls=node.calls)
        copied[node.name] = copy
    return Trace(graph, trace.output, trace.calls)


def _next(reads: Iterator[fx.Node], _: fx.Node) -> fx.Node:
    return next(reads)
