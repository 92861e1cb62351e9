"""What stages hold and exchange, on random models: counted value by value."""

from __future__ import annotations

from helpers.graphs import model_graphs, profile_of
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpp.graph import FEED, ModelGraph
from lightning_gpp.planner.graphpipe.draft import UnitTables
from lightning_gpp.planner.graphpipe.rates import Contents
from lightning_gpp.planner.make_plan import plan_request
from lightning_gpp.planner.request_tables import edge_bytes
from lightning_gpp.planner.units.units import UnitGraph


def follows(units: UnitGraph, target: int, others: set[int]) -> bool:
    """Whether a unit comes after one of others."""
    todo, seen = [target], set()
    while todo:
        for source in units.predecessors[todo.pop()]:
            if source in others:
                return True
            if source not in seen:
                seen.add(source)
                todo.append(source)
    return False


def expected(graph: ModelGraph, units: UnitGraph, stage: set[int], optimizer_values: int):
    operators = [graph.operator[name] for unit in stage for name in units.operators[unit]]
    names = {name for operator in operators for name in operator.parameters}
    trained = sum(graph.parameter[n].size_bytes for n in names if graph.parameter[n].requires_grad)
    sent = received = inputs = 0.0
    senders, num_sent, num_received = set(), 0, 0
    unit_of = {name: unit for unit, names in enumerate(units.operators) for name in names}
    fed = {item.value.name for item in graph.inputs if not item.requires_grad}
    for value in graph.values:
        targets = {unit_of[operator.name] for operator in graph if value in operator.inputs}
        source = unit_of[graph.producer[value]] if value in graph.producer else FEED
        size = edge_bytes(graph, [value], has_backward=value not in fed)
        outside = targets - stage
        if source not in stage and stage & targets:
            received += size.forward(8)
            inputs += size.forward(8)
            sent += size.backward(8) * (source != FEED)
            senders.add(source)
        if source in stage:
            for target in outside:
                if not follows(units, target, outside - {target}):
                    sent += size.forward(8)
                    received += size.backward(8)
                    num_sent += 1
                    num_received += 1
    return {
        "kept_bytes": sum(graph.parameter[name].size_bytes for name in names)
        + trained * (1 + optimizer_values),
        "gradient_bytes": trained,
        "has_state": any(operator.state for operator in operators),
        "sent": sent,
        "received": received,
        "inputs": inputs,
        "num_sent": num_sent + len(senders - {FEED}),
        "num_received": num_received + len(senders),
    }


@given(model_graphs(), st.data())
@settings(max_examples=80)
def test_contents_are_the_sums_over_values(graph, data):
    request = plan_request(graph, 2, minibatch_size=8, costs=profile_of(graph))
    tables = UnitTables(request)
    bounds = st.sets(st.integers(0, tables.num_units), min_size=2, max_size=2)
    start, stop = sorted(data.draw(bounds))
    stage = set(tables.order[start:stop])
    found = Contents(tables).of((start, stop))._asdict()
    for name in ("sent", "received", "inputs"):
        per_sample, fixed = found[name]
        found[name] = per_sample * 8 + fixed
    wanted = expected(graph, tables.units, stage, request.optimizer_values)
    assert {name: found[name] for name in wanted} == wanted
