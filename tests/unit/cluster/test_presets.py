from __future__ import annotations

from pathlib import Path

import pytest

from lightning_gpp.cluster import (
    PRESETS,
    DeviceKind,
    cluster_preset,
)
from lightning_gpp.cluster.this_machine import host_memory_bytes, num_cores

CONFIGS = Path(__file__).parents[3] / "configs" / "cluster"


def test_summit_has_four_gpus_per_node_and_eighteen_nodes_per_rack():
    summit = cluster_preset("summit", num_devices=4 * 19)
    assert len({device.host for device in summit.devices}) == 19
    assert [summit.devices[i].rack for i in (71, 72)] == ["rack0", "rack1"]
    assert summit.link(0, 3).bandwidth_bytes_per_s > summit.link(3, 4).bandwidth_bytes_per_s
    assert summit.link(0, 4) == summit.link(0, 75)  # a non-blocking fat tree
    assert summit.devices[0].memory_bytes == 16e9


@pytest.mark.parametrize(("name", "per_host"), [("summit", 4), ("dgx_a100", 8), ("dgx_h100", 8)])
def test_one_host_by_default(name, per_host):
    cluster = cluster_preset(name)
    assert cluster.num_devices == per_host
    assert cluster.device_kind(cluster.kinds[0]).source.startswith("peaks: NVIDIA")


def test_a_cpu_is_measured_and_shared():
    one, two = cluster_preset("cpu", num_devices=1), cluster_preset("cpu", num_devices=2)
    whole, half = one.device_kind("cpu"), two.device_kind("cpu")
    assert half.flops_per_s("float32") == pytest.approx(whole.flops_per_s("float32") / 2)
    assert half.memory_bytes_per_s == pytest.approx(whole.memory_bytes_per_s / 2)
    assert whole.flops_per_s("float32") > 1e8 and whole.memory_bytes_per_s > 1e8
    assert one.devices[0].memory_bytes == host_memory_bytes()
    assert cluster_preset("cpu").num_devices == num_cores()


def test_mistakes_say_what_is_known():
    with pytest.raises(ValueError, match="unknown cluster 'sumit'; known clusters: summit, dgx"):
        cluster_preset("sumit")
    with pytest.raises(ValueError, match=r"cluster 'summit': .*unexpected keyword argument 'kind'"):
        cluster_preset("summit", kind="x")
    with pytest.raises(ValueError, match="path of the cluster file: expected a text, got None"):
        cluster_preset("from_file", path=None)
    with pytest.raises(ValueError, match="num_devices must be at least 1, got 0"):
        cluster_preset("cpu", num_devices=0)
    with pytest.raises(ValueError, match="nothing is known of devices of kind 'Abacus'; known"):
        cluster_preset("uniform", kind="Abacus").device_kind("Abacus")


def test_kinds_state_what_is_sustained():
    kind = DeviceKind("toy", {"float32": 10.0}, 4.0, compute_efficiency=0.5, memory_efficiency=0.25)
    assert (kind.flops_per_s("float32"), kind.memory_bytes_per_s) == (5.0, 1.0)
    with pytest.raises(ValueError, match="computes in float16 is not known, only: float32"):
        kind.flops_per_s("float16")
    with pytest.raises(ValueError, match="compute_efficiency and memory_efficiency as parts"):
        DeviceKind("toy", {"float32": 1.0}, 1.0, compute_efficiency=1.5)
    with pytest.raises(ValueError, match="needs peak_flops_per_s of at least one dtype"):
        DeviceKind("toy", {}, 1.0)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_config(name):
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    config = OmegaConf.load(CONFIGS / f"{name}.yaml")
    config.num_devices = 6
    if name == "from_file":
        config.path = str(Path(__file__).parent / "files" / "mixed_pool.yaml")
    assert instantiate(config).num_devices == 6
