"""Files that are broken in ways that have nothing to do with what should be in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_gpp.cluster import load_cluster
from lightning_gpp.common.data_file import read_data_file, read_text
from lightning_gpp.cost import load_costs
from lightning_gpp.graph import ModelGraph, graph_to_json
from lightning_gpp.jobs.problem.problem_of import read_graph_file
from lightning_gpp.planner import load_plan
from lightning_gpp.workloads import read_pipedream_profile, read_piper_workload

Reader = Callable[[Path], object]

JSON_READERS: dict[str, Reader] = {
    "piper": read_piper_workload,
    "graph": read_graph_file,
    "cluster": load_cluster,
    "costs": load_costs,
    "plan": load_plan,
}

BROKEN = {
    "empty": (b"", "not JSON: Expecting value"),
    "cut off": (b'{"format": "lightning_gpp.plan",', "not JSON: .*line 1"),
    "binary": (b"\x80\x81\x00\xff", r"not a text file in UTF-8 .*; expected"),
    "latin-1": ('{"ä": 1}'.encode("latin-1"), "not a text file in UTF-8"),
    "UTF-16": ("{}".encode("utf-16"), "not a text file in UTF-8"),
    "deep": (b"[" * 100_000, "not JSON that can be read: too deeply nested"),
    "long number": (b'{"format": ' + b"9" * 5000 + b"}", "not JSON: .*digit"),
    "key twice": (b'{"format": 1, "format": 2}', "key 'format' is there twice"),
    "a list": (b"[1]", "expected .*, got"),
    "null": (b"null", "expected .*, got None"),
}


@pytest.mark.parametrize("reader", JSON_READERS)
@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_one_line_with_its_name(tmp_path, reader, kind):
    content, match = BROKEN[kind]
    path = tmp_path / "mine.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"mine.json: {match}") as caught:
        JSON_READERS[reader](path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("reader", [*JSON_READERS.values(), read_pipedream_profile])
def test_a_folder_is_no_file(tmp_path, reader):
    with pytest.raises((ValueError, FileNotFoundError), match=r"no file .*mine.json'?; expected"):
        reader(tmp_path / "mine.json")
    (tmp_path / "mine.json").mkdir()
    with pytest.raises((ValueError, FileNotFoundError), match=r"no file .*mine.json'?; expected"):
        reader(tmp_path / "mine.json")


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    path = tmp_path / "graph.json"
    graph = ModelGraph(inputs=(), operators=(), outputs=())
    path.write_text(graph_to_json(graph), encoding="utf-8-sig")
    assert read_graph_file(path).graph == graph
    assert read_text(path, "a graph").startswith("{")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a:\n\t- b", r"mine.yaml: not YAML: .*found character '\\t'.* line 2"),
        ("a: *b", "mine.yaml: not YAML: .*found undefined alias 'b'.* line 1"),
        ("a: 1\nb: {c: 1, c: 2}", "mine.yaml: not YAML: .*found duplicate key c.* line 2"),
        ("a: " + "9" * 5000, "mine.yaml: not YAML: Exceeds the limit"),
        ("a: !!python/object:os.system {}", "mine.yaml: not YAML: could not determine.* line 1"),
        ("a: \x07", "mine.yaml: not YAML: unacceptable character"),
    ],
)
def test_broken_yaml_is_one_line_with_file_and_line(tmp_path, text, match):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=match) as caught:
        read_data_file(path)
    assert "\n" not in str(caught.value)
