"""The other end of :mod:`helpers.workers`: a process that runs calls as a rank, one by one."""

from __future__ import annotations

import faulthandler
import io
import math
import os
import pickle
import random
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

THREAD_GRACE_S = 1.5


def main() -> None:
    """Serves calls until the pool closes the pipe. Arguments: file descriptor, stacks file."""
    connection = Connection(int(sys.argv[1]))
    stacks = Path(sys.argv[2])
    import lightning.pytorch  # noqa: F401
    import torch
    from tqdm import tqdm

    from lightning_gpp.strategy.planning import profile_cache

    profile_cache.BUSY = math.inf  # profiles are kept for later tests, however busy the machine is
    tqdm.monitor_interval = 0  # torch.compile has a bar, whose monitor thread would stay
    torch.set_num_threads(1)
    environment = dict(os.environ)
    connection.send_bytes(b"ready")
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        path, folder, variables, limit_s, call = pickle.loads(message)
        sys.path[:] = path
        os.chdir(folder)
        with _rank(environment | variables), _time_limit(limit_s, stacks):
            answer = _answer(call)
        connection.send_bytes(answer)


def _answer(call: bytes) -> bytes:
    """The pickled fields of the :class:`~helpers.workers.Outcome` of a call."""
    before = set(threading.enumerate())
    start = time.monotonic()
    try:
        function, args, kwargs = pickle.loads(call)
        fields: dict[str, Any] = {"value": function(*args, **kwargs)}
    # A remote test process reports whatever ends a call, SystemExit and KeyboardInterrupt too.
    except BaseException as error:
        fields = {
            "error_type": type(error).__name__,
            "error": "\n".join(_messages(error)),
            "traceback": traceback.format_exc(),
        }
        del error
    fields["elapsed_s"] = time.monotonic() - start
    _destroy_process_group()
    fields["leaked"] = _leaked_threads(before)
    sys.stdout.flush()
    try:
        return _dumps(fields)
    except Exception:
        text = traceback.format_exc()
        return pickle.dumps({"error_type": "PicklingError", "error": text, "traceback": text})


def _dumps(value: Any) -> bytes:
    """Pickles a value with its tensors on the CPU: whoever reads it may have no such device."""
    file = io.BytesIO()
    _OnCpu(file).dump(value)
    return file.getvalue()


class _OnCpu(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        import torch

        if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta"):
            return value.cpu().__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return NotImplemented


def _messages(error: BaseException | None) -> Iterator[str]:
    while error is not None:
        yield f"{type(error).__name__}: {error}"
        error = error.__cause__


@contextmanager
def _rank(environment: dict[str, str]) -> Iterator[None]:
    """Makes the process the rank that the environment says, with seeds and defaults as new."""
    import numpy
    import torch
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    os.environ.clear()
    os.environ.update(environment)
    rank_zero_only.rank = int(environment["RANK"])
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    # Ranks start with different random states, as ranks of a real job do.
    seed = 1000 + int(environment["RANK"])
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    yield


@contextmanager
def _time_limit(limit_s: float, stacks: Path) -> Iterator[None]:
    """After the limit, writes all stacks to the file and ends the process."""
    with stacks.open("w") as file:
        faulthandler.dump_traceback_later(limit_s, exit=True, file=file)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
    stacks.unlink()


def _destroy_process_group() -> None:
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    # A start that failed was counted too, and ranks meet only under the same number.
    torch.distributed.distributed_c10d._world.group_count = 0


def _is_torchs(thread: threading.Thread) -> bool:
    """Whether Python did not start it: autograd has a thread for every device, which stays."""
    return isinstance(thread, threading._DummyThread)


def _leaked_threads(before: set[threading.Thread]) -> tuple[str, ...]:
    """Names of the threads that a call started and that do not end by themselves."""
    end = time.monotonic() + THREAD_GRACE_S
    while leaked := {each for each in threading.enumerate() if not _is_torchs(each)} - before:
        if time.monotonic() > end:
            return tuple(sorted(thread.name for thread in leaked))
        time.sleep(0.01)
    return ()
