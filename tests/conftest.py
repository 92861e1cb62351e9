"""Fixtures for all tests: every test leaves the process as it found it.

torch is touched only where a test has imported it: the rooms ``graph`` to ``simulate`` are
tested without it.
"""

from __future__ import annotations

import atexit
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).parent
# Test modules import ``helpers``; worker processes inherit the path.
sys.path.insert(0, str(TESTS))
pytest.register_assert_rewrite("helpers.reference")

from helpers.workers import WorkerPool  # noqa: E402
from standin.switch import kind, switch_on  # noqa: E402
from standin.unsupported import reason_to_skip  # noqa: E402

switch_on()

# HYPOTHESIS_PROFILE=thorough searches many times longer, with other examples in every run. How long
# anything takes on a machine that others use as well is no reason to fail.
untimed: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("quick", **untimed, derandomize=True, max_examples=12, print_blob=True)
settings.register_profile("thorough", **untimed, max_examples=200, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

# Profiles and plans that tests make are kept apart from the user's, for as long as the tests run;
# worker processes inherit the folder.
os.environ["LIGHTNING_GPP_CACHE"] = CACHE = tempfile.mkdtemp(prefix="lightning-gpp-tests-")
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)

RUN_FOLDERS = ("lightning_logs", "checkpoints", "outputs", "multirun")
"""What training leaves in the working directory when a test forgets to change it."""

THREAD_GRACE_S = 3.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="every case of tests marked as sampled")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what cannot run on the tests' devices, and cases between those of a sample."""
    seen: Counter[str] = Counter()
    left_out: set[pytest.Item] = set()
    for item in items:
        if kind() is not None and (reason := reason_to_skip(item.nodeid)):
            item.add_marker(pytest.mark.skip(reason=reason))
        if (sampled := item.get_closest_marker("sampled")) and not config.option.all:
            test, (every, *first) = item.nodeid.partition("[")[0], sampled.args
            if seen[test] % every != sum(first):
                left_out.add(item)
            seen[test] += 1
        elif item.get_closest_marker("extra") and not config.option.all:
            left_out.add(item)
    if left_out:
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Worker processes that play ranks; started when first used."""
    workers = WorkerPool()
    yield workers
    workers.close()


@pytest.fixture(autouse=True)
def restored_process() -> Iterator[None]:
    """Restores environment, working directory, random states and torch's global settings."""
    environment = dict(os.environ)
    folder = Path.cwd()
    python_state = random.getstate()
    torch_state = _torch_state()
    yield
    _restore_torch(torch_state)
    random.setstate(python_state)
    os.chdir(folder)
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails a test that leaves a thread, a process group or a training run's files behind."""
    threads = set(threading.enumerate())
    folders = {name for name in RUN_FOLDERS if Path(name).exists()}
    yield
    _check_process_group()
    if leaked := _leaked_threads(threads):
        pytest.fail(f"the test left threads running: {leaked}")
    if left := {name for name in RUN_FOLDERS if Path(name).exists()} - folders:
        pytest.fail(f"the test left {sorted(left)} in {Path.cwd()}; use the fixture run_folder")


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Processes that the test starts heed Ctrl-C, also when the tests run in the background.

    A shell without job control lets its background jobs ignore it, and children inherit that.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _torch_state() -> dict[str, object]:
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    torch.set_num_threads(1)
    return {
        "random": torch.get_rng_state(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "grad": torch.is_grad_enabled(),
        "numpy": sys.modules["numpy"].random.get_state(),
    }


def _restore_torch(state: dict[str, object]) -> None:
    if not state:
        return
    torch = sys.modules["torch"]
    torch.set_rng_state(state["random"])
    torch.set_default_dtype(state["dtype"])
    torch.use_deterministic_algorithms(state["deterministic"])
    torch.set_grad_enabled(state["grad"])
    torch.set_num_threads(1)
    sys.modules["numpy"].random.set_state(state["numpy"])


def _check_process_group() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("the test left the default process group initialized")


def _leaked_threads(before: set[threading.Thread]) -> list[str]:
    end = time.monotonic() + THREAD_GRACE_S
    while leaked := set(threading.enumerate()) - before:
        if time.monotonic() > end:
            return sorted(thread.name for thread in leaked)
        time.sleep(0.01)
    return []
