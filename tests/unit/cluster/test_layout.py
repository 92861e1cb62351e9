"""A mixed pool: V100 hosts in rack 0, A100 hosts in racks 1 and 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_gpp.cluster import (
    Cluster,
    Device,
    Link,
    cluster_to_json,
    load_cluster,
)
from lightning_gpp.cluster.cluster import FORMAT

POOL = Path(__file__).parent / "files" / "mixed_pool.yaml"


def edited(tmp_path: Path, old: str, new: str, name: str = "pool.yaml") -> Path:
    text = POOL.read_text()
    assert old in text
    path = tmp_path / name
    path.write_text(text.replace(old, new))
    return path


def test_devices_count_through_the_hosts_of_every_group():
    pool = load_cluster(POOL)
    assert pool.num_devices == 4 * 4 + 4 * 8
    assert pool.kinds == ("Tesla V100-SXM2-16GB", "NVIDIA A100-SXM4-80GB")
    assert pool.devices[15].host == "host3" and pool.devices[16].host == "host4"
    assert [pool.devices[i].rack for i in (0, 15, 16, 31, 32)] == [
        *("rack0", "rack0"),
        *("rack1", "rack1"),
        "rack2",
    ]


def test_memory_comes_from_the_data_sheet_of_the_kind():
    pool = load_cluster(POOL)
    assert (pool.devices[0].memory_bytes, pool.devices[16].memory_bytes) == (16e9, 80e9)


def test_links_of_every_level():
    pool = load_cluster(POOL)
    assert pool.link(0, 1) == pool.link(16, 17) == Link(42.5e9, 10e-6)  # in a host
    assert pool.link(0, 4) == pool.link(16, 24) == Link(22e9, 20e-6)  # in a rack
    assert pool.link(0, 16) == pool.link(24, 32) == Link(11e9, 30e-6)  # between racks
    assert pool.slowest_link == pool.spine_link


def test_a_cluster_survives_json_and_older_documents_are_read():
    pool = load_cluster(POOL)
    text = cluster_to_json(pool)
    assert FORMAT.loads(Cluster, text) == pool
    old = '{"format": "lightning_gpp.cluster", "version": 1, "devices": [{"name": "a"}]}'
    assert FORMAT.loads(Cluster, old) == Cluster((Device("a"),))


def test_a_file_may_list_every_device(tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text(cluster_to_json(load_cluster(POOL)))
    cut = load_cluster(path, num_devices=16)
    assert cut.num_devices == 16


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("devices_per_host: 8", "devices_per_host: many", r"hosts\[1\]: devices_per_host: expect"),
        (
            "num_hosts: 4\n",
            "num_hosts: 0\n",
            r"pool.yaml: hosts\[1\]: num_hosts must be at ",
        ),
        ("latency_s: 30e-6", "latency: 30e-6", r"spine_link: unknown key 'latency'; expected"),
        (
            "version: 1",
            "version: 7",
            'pool.yaml: expected "format": "lightning_gpp',
        ),
        (
            "format: lightning_gpp.cluster_layout",
            "kind: x",
            r'yaml: expected "format": .*None',
        ),
        ("hosts:", "hosts: [", "pool.yaml: not YAML: .* line [0-9]+"),
        ("22e9", "-22e9", "rack_link: a link needs a bandwidth above 0"),
    ],
)
def test_broken_files_name_file_and_key(tmp_path, old, new, message):
    with pytest.raises(ValueError, match=message):
        load_cluster(edited(tmp_path, old, new))


def test_broken_json_names_the_line(tmp_path):
    path = tmp_path / "pool.json"
    path.write_text('{"format":\n}')
    with pytest.raises(ValueError, match=r"pool.json: not JSON: .*line 2"):
        load_cluster(path)
    with pytest.raises(FileNotFoundError, match=r"there is no file .*nowhere.json"):
        load_cluster(tmp_path / "nowhere.json")
