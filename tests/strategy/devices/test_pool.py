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
from helpers.training import Result, Training, train
from helpers.workers import WorkerPool

from lightning_gpp.runtime.processes.groups import RankDevice
from lightning_gpp.runtime.transport.process_transport import ProcessTransport
from lightning_gpp.strategy.devices.accelerators import parse_pool

TOWERS, TOP = ["left", "right"], ["fuse", "norm", "head"]
TRAINING = Training(ExportableModel, DataSpec(num_inputs=2), num_steps=6)


# Names and lists ---------------------------------------------------------------------------------


def test_installation_alone_registers_it() -> None:
    code = (
        "import lightning.pytorch as lp\n"
        "from lightning.pytorch.strategies import StrategyRegistry as strategies\n"
        "print(*sorted(name for name in strategies if 'graphpipe' in name))\n"
        "trainer = lp.Trainer(accelerator='pool', devices=['cpu', 'cpu'], strategy='graphpipe',\n"
        "    logger=False, enable_checkpointing=False)\n"
        "print(type(trainer.accelerator).__name__, trainer.num_devices)\n"
        "print(type(lp.Trainer(barebones=True).accelerator).__name__)\n"
        "try: lp.Trainer(accelerator='mps')\n"
        "except Exception as error: print('pool' in str(error))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    lines = done.stdout.splitlines()
    names = [f"graphpipe{suffix}" for suffix in ("", "_async", "_fork", "_notebook", "_spawn")]
    assert lines == [" ".join(names), "PoolAccelerator 2", "CPUAccelerator", "True"], (
        done.stdout + done.stderr
    )


@pytest.mark.parametrize(
    ("devices", "error", "text"),
    [
        ("", ValueError, "empty list"),
        ([], ValueError, "empty list"),
        (2, TypeError, r'devices="cuda:0,cuda:1,cpu" .* got devices=2'),
        ([0, "cpu"], TypeError, "the entry 0"),
        ("cpu,gpu0", ValueError, "unknown device 'gpu0'"),
        ("cpu,mtia", ValueError, "got 'mtia', for which Lightning has no accelerator; it has cpu,"),
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


# Costs of every kind -----------------------------------------------------------------------------


# Training ----------------------------------------------------------------------------------------


def on_pool(training: Training) -> Training:
    trainer = {**training.trainer, "accelerator": "pool", "devices": "cpu,cpu"}
    return dataclasses.replace(training, trainer=trainer)


def test_training_equals_one_device(pool: WorkerPool, tmp_path: Any) -> None:
    saved = str(tmp_path / "pool.ckpt")
    training = dataclasses.replace(TRAINING, trainer={"gradient_clip_val": 0.5})
    expected = train_one_device(training)
    mixed = dataclasses.replace(on_pool(training), save_as=saved)
    results = pool.run(train, mixed, {"timeout": 100}, 2, num_ranks=2)
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
        result = train(training, {"timeout": 100, **strategy}, 2)
    return result, len(opened)


def test_mixed_ranks_meet_by_gloo_and_train_alike(pool: WorkerPool) -> None:
    """Messages of stages, and sums of replicas."""
    expected = train_one_device(TRAINING)
    replicas = [{"modules": [*TOWERS, *TOP], "devices": [0, 1]}]
    for plan in ([TOWERS, TOP], replicas):
        ranks = pool.run(train_as_gpu_and_cpu, on_pool(TRAINING), plan=plan, num_ranks=2)
        assert [opened for _, opened in ranks] == [2, 2]  # for stages, and for heartbeats
        results = [result for result, _ in ranks]
        assert_same_training(results, expected, "float64")
        assert_equal_copies(results)
