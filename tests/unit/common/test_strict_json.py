from __future__ import annotations

import json

import pytest

from lightning_gpp.cluster import Cluster, cluster_to_json, uniform_cluster
from lightning_gpp.cluster.cluster import FORMAT
from lightning_gpp.cost import costs_from_json
from lightning_gpp.planner import Plan, Stage, plan_to_json
from lightning_gpp.planner.plan.plan import plan_from_json

PLAN = Plan((Stage(0, ("a",), (0,)), Stage(1, ("b", "c"), (1,), microbatch_multiple=2)))


def changed(**changes: object) -> str:
    """The document of PLAN with its first stage changed; None removes a key."""
    data = json.loads(plan_to_json(PLAN))
    stage = data["stages"][0] | changes
    data["stages"][0] = {key: item for key, item in stage.items() if item is not None}
    return json.dumps(data)


def test_a_plan_is_readable():
    data = json.loads(plan_to_json(PLAN))
    assert list(data)[:2] == ["format", "version"]
    assert data["stages"][1] == {
        "id": 1,
        "operators": ["b", "c"],
        "devices": [1],
        "microbatch_multiple": 2,
        "recompute": False,
        "shares": [],
    }
    assert plan_from_json(plan_to_json(PLAN)) == PLAN


def test_plans_of_an_older_version_are_read():
    data = json.loads(plan_to_json(PLAN)) | {"version": 1}
    assert data.pop("order_pace") is None
    assert plan_from_json(json.dumps(data)) == PLAN
    with pytest.raises(ValueError, match="order_pace must be a number from 0 to 1, got 2"):
        plan_from_json(json.dumps(data | {"version": 2, "order_pace": 2}))


def test_fields_with_a_default_may_be_left_out():
    assert plan_from_json(changed(microbatch_multiple=None)) == PLAN


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (changed(colour="red"), r"my.json: stages\[0\]: unknown key 'colour'; expected one of: id"),
        (changed(devices=None), r"my.json: stages\[0\]: key 'devices' is missing; expected an arr"),
        (changed(id="0"), r"my.json: stages\[0\]: id: expected an integer, got '0'"),
        (changed(id=True), r"my.json: stages\[0\]: id: expected an integer, got True"),
        (changed(operators="a"), r"operators: expected an array \(a string each\), got 'a'"),
        (changed(operators=["a", 1]), r"operators\[1\]: expected a string, got 1"),
        (
            changed(microbatch_multiple=0),
            r"my.json: stages\[0\]: stage 0: microbatch_multiple must",
        ),
        ("[1, 2]", r"my.json: expected an object, got \[1, 2\]"),
        ("{", "my.json: not JSON: "),
        ("{}", '"format": "lightning_gpp.plan" and "version": 2, got None and None'),
        (plan_to_json(PLAN).replace('"version": 2', '"version": 3'), "'lightning_gpp.plan' and 3"),
    ],
)
def test_errors_name_the_file_the_place_and_what_is_expected(text, match):
    with pytest.raises(ValueError, match=match):
        plan_from_json(text, source="my.json")


def test_whole_numbers_may_stand_for_seconds():
    text = (
        '{"format": "lightning_gpp.costs", "version": 1, "profiles": [{"microbatch_size": 2,'
        ' "operators": {"a": {"forward_s": 1}}}]}'
    )
    assert costs_from_json(text).profiles[0].operators["a"].forward_s == 1.0
    with pytest.raises(
        ValueError, match=r"operators\['a'\]: forward_s: expected a number, got 'x'"
    ):
        costs_from_json(text.replace(": 1}}}", ': "x"}}}'))


def test_optional_fields_take_null():
    cluster = uniform_cluster(2)
    assert cluster.devices[0].memory_bytes is None
    assert FORMAT.loads(Cluster, cluster_to_json(cluster)) == cluster
    text = cluster_to_json(cluster).replace("null", "1.5")
    with pytest.raises(ValueError, match=r"memory_bytes: expected an integer, got 1.5"):
        FORMAT.loads(Cluster, text)
    assert isinstance(FORMAT.loads(Cluster, cluster_to_json(cluster)), Cluster)
