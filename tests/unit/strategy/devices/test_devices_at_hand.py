from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lightning_gpp.cluster import cluster_preset, cluster_to_json
from lightning_gpp.planner import Plan, Stage
from lightning_gpp.planner.plan.by_rank import in_plan_order, rank_of_device
from lightning_gpp.strategy.devices.devices_at_hand import (
    BESIDE_TENSORS_BYTES,
    DeviceAtHand,
    check_cluster,
    cluster_at_hand,
    resolve_cluster,
)

GPU = DeviceAtHand("cuda:0", "NVIDIA H200", 100, "gpus")
CPU = DeviceAtHand("cpu", "cpu", 100, "cpus")


def test_processes_of_a_host_share_its_memory():
    cluster = cluster_at_hand([CPU, GPU, CPU, replace(CPU, host="other")])
    assert [device.memory_bytes for device in cluster.devices] == [50, 100, 50, 100]
    assert cluster.kinds == ("cpu", "NVIDIA H200")
    assert cluster.link(0, 2) == cluster.host_link and cluster.link(0, 3) == cluster.rack_link


def test_processes_on_a_gpu_share_what_their_contexts_leave():
    card = DeviceAtHand("cuda:0", "NVIDIA H200", 8 * 2**30, "gpus", "GPU-1")
    found = cluster_at_hand([card, card, replace(card, identity="GPU-2")]).devices
    left = [4 * 2**30, 4 * 2**30, 8 * 2**30]
    assert [device.memory_bytes for device in found] == [n - BESIDE_TENSORS_BYTES for n in left]
    (small,) = cluster_at_hand([replace(card, memory_bytes=2**30)]).devices
    assert small.memory_bytes == 2**29


def test_presets_files_and_clusters_are_cut_to_the_ranks(tmp_path: Path):
    summit = cluster_preset("summit", 8)
    path = tmp_path / "cluster.json"
    path.write_text(cluster_to_json(summit))
    assert resolve_cluster("summit", 3) == resolve_cluster(path, 3) == summit.first(3)
    assert resolve_cluster(summit, 3) == summit.first(3)
    with pytest.raises(ValueError, match="the cluster has 8 devices, but there are 9 ranks"):
        resolve_cluster(summit, 9)


def test_what_is_no_cluster_is_refused_at_once():
    with pytest.raises(ValueError, match=r"cluster='sumit' is neither a preset \(summit, .* file"):
        check_cluster("sumit")
    with pytest.raises(TypeError, match="cluster is a int; expected a Cluster, the name"):
        check_cluster(4)


def test_the_device_of_the_loss_is_that_of_rank_0():
    """Hosts of two: ranks 0 1 | 2 3. The plan's devices are those of ranks 1, 2, 3, 0."""
    cluster = cluster_at_hand([replace(GPU, host=host) for host in ("a", "a", "b", "b")])
    ordered = in_plan_order(cluster)
    plan = Plan(tuple(Stage(i, (f"op{i}",), (i,)) for i in range(4)))
    ranks = rank_of_device(plan, 4)
    assert [ordered.devices[i] for i in range(4)] == [cluster.devices[rank] for rank in ranks]
