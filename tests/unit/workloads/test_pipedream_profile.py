from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.published import PIPEDREAM, shared_graph

import lightning_gpp
from lightning_gpp.cost import ANY_DEVICE, OpProfile


def read(tmp_path: Path, text: str = PIPEDREAM, **options: Any):
    path = tmp_path / "graph.txt"
    path.write_text(text)
    return lightning_gpp.read_pipedream_profile(path, **({"samples": 10} | options))


def test_operators_edges_and_units(tmp_path):
    workload = read(tmp_path)
    graph = workload.graph
    assert [o.name for o in graph] == ["node2", "node3", "node4", "node6"]  # no input, no idle item
    assert graph.predecessors["node6"] == ("node2", "node4")
    assert graph.outputs == ("node6_out",)
    (profile,) = workload.costs.profiles
    assert profile.device == ANY_DEVICE
    assert profile.operators["node2"] == OpProfile(1.5e-3, 3e-3, activation_bytes=4000)
    assert profile.operators["node3"].activation_bytes == 960
    assert [spec.size_bytes for spec in graph.values["node3_out"].tensors] == [800, 160]
    assert graph.parameter["node2.weight"].size_bytes == 864


def test_samples_have_to_be_given(tmp_path):
    assert read(tmp_path).graph.microbatch_size == 10
    assert read(tmp_path, samples=5).minibatch_size(4) == 20
    with pytest.raises(ValueError, match=r"how many samples it was measured with: give samples="):
        read(tmp_path, samples=None)
    with pytest.raises(ValueError, match="samples must be at least 1, got 0"):
        read(tmp_path, samples=0)
    with pytest.raises(ValueError, match=r"samples must be a whole number .*got 1\.5"):
        read(tmp_path, samples=1.5)


def line(number: int, old: str, new: str) -> str:
    lines = PIPEDREAM.splitlines()
    assert old in lines[number - 1]
    lines[number - 1] = lines[number - 1].replace(old, new)
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "no operator; expected a profile of PipeDream"),
        (line(2, " -- Conv2d(3, 8, kernel_size=(3, 3))", ""), "line 2: expected 'node -- descri"),
        (line(2, "node2", "node3"), "line 3: operator 'node3' is there twice"),
        (line(2, "=1.500", "=fast"), "line 2: forward_compute_time: expected a number .*'fast'"),
        (line(2, "backward", "forward"), "line 2: expected 'node -- description"),
        (line(4, "parameter_size", "size"), "line 4: expected 'node -- description"),
        (line(8, "node3", "node2"), "line 8: expected an edge .*'node2 -- node2'"),
        (line(8, "node3", "node9"), "line 8: an edge names 'node9', but no line describes it"),
        (
            PIPEDREAM + "\tnode6 -- node2\n",
            "graph.txt: expected a graph without cycles, but .*node6",
        ),
    ],
)
def test_broken_files(tmp_path, text, match):
    with pytest.raises(ValueError, match=match):
        read(tmp_path, text)


def test_no_file_and_no_text(tmp_path):
    with pytest.raises(
        ValueError, match=r"no file .*missing.txt'; expected a profile of PipeDream"
    ):
        lightning_gpp.read_pipedream_profile(tmp_path / "missing.txt")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"binary.txt: not a text file"):
        lightning_gpp.read_pipedream_profile(tmp_path / "binary.txt")


@pytest.mark.parametrize(
    ("name", "operators", "samples"),
    [
        ("vgg16", 40, 128),  # without the input
        ("squeezenet1_0", 67, 256),
        ("resnet50", 176, 128),
        ("inception_v3", 325, 128),
        ("gnmt", 37, 32),  # without three inputs and eight idle items
    ],
)
def test_published_profiles(name, operators, samples):
    workload = lightning_gpp.read_pipedream_profile(
        shared_graph(f"pipedream/{name}.txt"), samples=samples
    )
    assert (len(workload.graph), workload.graph.microbatch_size) == (operators, samples)
    seconds = [o.forward_s + o.backward_s for o in workload.costs.at(samples).operators.values()]
    assert 0.05 < sum(seconds) < 1  # a mini-batch on one GPU
