"""The accelerator ``pool``: its registration, its list of devices, and training on it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import lightning.pytorch as lp
import pytest
import torch
import torch.distributed as dist
from helpers.models import DataSpec, ExportableModel
from helpers.reference import assert_equal_copies, assert_same_training, train_one_device
from helpers.training import Result, Training, quiet, train
from helpers.workers import WorkerPool
from lightning.pytorch.accelerators import AcceleratorRegistry, CPUAccelerator

from lightning_gpp import PoolAccelerator
from lightning_gpp.runtime.processes.rank_devices import RankDevice
from lightning_gpp.runtime.transport.process_transport import ProcessTransport
from lightning_gpp.strategy.devices.pool import parse_pool

CPU = torch.device("cpu")
TOWERS, TOP = ["left", "right"], ["fuse", "norm", "head"]
TRAINING = Training(ExportableModel, DataSpec(num_inputs=2), num_steps=6)


# Names and lists ---------------------------------------------------------------------------------


def test_installation_alone_registers_it() -> None:
    code = (
        "import lightning.pytorch as lp\n"
        "from lightning.pytorch.accelerators import AcceleratorRegistry as registry\n"
        "trainer = lp.Trainer(accelerator='pool', devices=['cpu', 'cpu'], strategy='graphpipe',\n"
        "    logger=False, enable_checkpointing=False)\n"
        "print(type(trainer.accelerator).__name__, trainer.num_devices)\n"
        "print(type(lp.Trainer(barebones=True).accelerator).__name__)\n"
        "try: lp.Trainer(accelerator='mps')\n"
        "except Exception as error: print('pool' in str(error))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert lines == ["PoolAccelerator 2", "CPUAccelerator", "True"], done.stdout + done.stderr


@pytest.mark.parametrize("devices", ["cpu,cpu", " cpu , cpu ,", ["cpu", "cpu"], (CPU, "cpu")])
def test_lists_of_devices(devices: Any) -> None:
    assert parse_pool(devices) == [CPU, CPU]


def test_gpus_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = parse_pool("cuda:1, cpu, cuda, cuda:1")
    assert [str(device) for device in found] == ["cuda:1", "cpu", "cuda:0", "cuda:1"]
    with pytest.raises(ValueError, match=r"names cuda:2, but only cuda:0 to cuda:1 are there"):
        parse_pool("cuda:2")


def test_devices_of_a_plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that Lightning and torch know sets its devices up and clears them away itself."""
    calls: list[Any] = []

    class Intel(CPUAccelerator):
        def setup_device(self, device: torch.device) -> None:
            calls.append(device)

        def teardown(self) -> None:
            calls.append("teardown")

    monkeypatch.setitem(AcceleratorRegistry, "xpu", {"accelerator": Intel, "init_params": {}})
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    devices = parse_pool("xpu,mps,cpu")
    assert [str(device) for device in devices] == ["xpu:0", "mps:0", "cpu"]
    with pytest.raises(ValueError, match="names xpu:1, but only xpu:0 to xpu:0 are there"):
        parse_pool("xpu:1")
    accelerator = PoolAccelerator()
    accelerator.teardown()  # of the process that starts the others
    accelerator.setup_device(devices[0])
    accelerator.teardown()
    assert calls == [devices[0], "teardown"]


@pytest.mark.parametrize(
    ("devices", "error", "text"),
    [
        ("", ValueError, "empty list"),
        ([], ValueError, "empty list"),
        (2, TypeError, r'devices="cuda:0,cuda:1,cpu" .* got devices=2'),
        ([0, "cpu"], TypeError, "the entry 0"),
        ("cpu,gpu0", ValueError, "unknown device 'gpu0'"),
        ("cpu,mtia", ValueError, "got 'mtia', for which Lightning has no accelerator; it has cpu,"),
        ("cpu:1", ValueError, "name 'cpu' once for every process"),
    ],
)
def test_what_is_no_pool_is_refused(devices: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        parse_pool(devices)


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="names cuda:0, but there is none here"):
        lp.Trainer(accelerator="pool", devices="cuda:0,cpu", strategy="graphpipe")
    with pytest.raises(ValueError, match="got none"):
        lp.Trainer(accelerator="pool", strategy="graphpipe")


def test_other_strategies_are_refused() -> None:
    trainer = lp.Trainer(
        accelerator=PoolAccelerator(),
        devices=["cpu"],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
    )
    with (
        quiet(),
        pytest.raises(TypeError, match=r'"pool" works with the graphpipe .* SingleDeviceStrategy'),
    ):
        trainer.fit(ExportableModel(), DataSpec(num_inputs=2).loader())


# Costs of every kind -----------------------------------------------------------------------------


KINDS = [("cuda:0", "NVIDIA H200"), ("cpu", "cpu"), ("cuda:1", "NVIDIA H200"), ("cpu", "cpu")]


# Training ----------------------------------------------------------------------------------------


def on_pool(training: Training) -> Training:
    trainer = {**training.trainer, "accelerator": "pool", "devices": "cpu,cpu"}
    return dataclasses.replace(training, trainer=trainer)


def test_training_equals_one_device(pool: WorkerPool, tmp_path: Any) -> None:
    saved = str(tmp_path / "pool.ckpt")
    training = dataclasses.replace(TRAINING, trainer={"gradient_clip_val": 0.5})
    expected = train_one_device(training)
    mixed = dataclasses.replace(on_pool(training), save_as=saved)
    results = pool.run(train, mixed, {"timeout": 30}, 2, num_ranks=2)
    assert_same_training(results, expected, "float64")
    weights = torch.load(saved, weights_only=True)["state_dict"]
    assert all(torch.equal(weights[name], value) for name, value in results[0].weights.items())


def train_as_gpu_and_cpu(training: Training, **strategy: Any) -> tuple[Result, int]:
    """Rank 0 says that it has a GPU."""
    is_gpu = {True: RankDevice("cuda", "GPU-1"), False: RankDevice("cpu", "here")}
    opened: list[ProcessTransport] = []
    init = ProcessTransport.__init__

    def note(self: ProcessTransport, *args: Any, **kwargs: Any) -> None:
        opened.append(self)
        init(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankDevice, "of", lambda device: is_gpu[dist.get_rank() == 0])
        patch.setattr(ProcessTransport, "__init__", note)
        result = train(training, {"timeout": 30, **strategy}, 2)
    return result, len(opened)


def test_mixed_ranks_meet_by_gloo_and_train_alike(pool: WorkerPool) -> None:
    """Messages of stages, and sums of replicas."""
    expected = train_one_device(TRAINING)
    replicas = [{"modules": [*TOWERS, *TOP], "devices": [0, 1]}]
    for plan in ([TOWERS, TOP], replicas):
        ranks = pool.run(train_as_gpu_and_cpu, on_pool(TRAINING), plan=plan, num_ranks=2)
        assert [opened for _, opened in ranks] == [1, 1]
        results = [result for result, _ in ranks]
        assert_same_training(results, expected, "float64")
        assert_equal_copies(results)
