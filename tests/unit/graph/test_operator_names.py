from __future__ import annotations

import pytest
from helpers.graphs import literal_graph

from lightning_gpp.graph.operator_names import summarize_operators

GRAPH = literal_graph(
    {
        "enc.a.0": "x",
        "enc.a.1": "enc.a.0",
        "enc.a.2": "enc.a.1",
        "enc.b.0": "x",
        "cat()": "enc.a.2 enc.b.0",
        "add()": "cat() x",
        "mul()": "add()",
        "sub()": "mul()",
        "head": "sub()",
    }
)


@pytest.mark.parametrize(
    ("operators", "text"),
    [
        ("head", "head"),
        ("enc_a_0 enc_a_1 enc_a_2 enc_b_0", "enc (4)"),
        ("enc_a_0 enc_a_1 enc_a_2 head", "head, enc.a (3)"),
        ("enc_a_0 enc_a_1", "enc.a.0-1 (2)"),
        ("enc_a_0 enc_a_2 enc_b_0", "enc.b, enc.a.0, enc.a.2"),
        ("enc_b_0 cat", "enc.b, cat"),
        ("cat add mul sub", "cat, add, mul, …"),
    ],
)
def test_complete_modules_stand_for_their_operators(operators, text):
    assert summarize_operators(GRAPH, operators.split()) == text
