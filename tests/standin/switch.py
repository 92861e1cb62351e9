"""Which devices the training tests run on: CPUs, or the stand-in's GPUs.

``LIGHTNING_GPP_STANDIN=gpus`` gives every rank a GPU (NCCL), ``shared`` puts all ranks on one GPU
and ``mixed`` every second rank on the CPU (both staged through host memory). Imports the standard
library only.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

SWITCH = "LIGHTNING_GPP_STANDIN"
DELAY = "LIGHTNING_GPP_STANDIN_DELAY_US"
"""Environment variable: mean delay of an operator, in microseconds; none unless set."""
ON_PATH = Path(__file__).parent / "on_path"
KINDS = ("gpus", "shared", "mixed")


def kind() -> str | None:
    """What the switch says, if it is on."""
    given = os.environ.get(SWITCH)
    if given in (None, ""):
        return None
    if given not in KINDS:
        raise ValueError(f"{SWITCH} must be one of {KINDS}, got {given!r}")
    return given


def devices(num_ranks: int) -> dict[str, object]:
    """The Trainer's ``accelerator`` and ``devices`` for this many ranks."""
    match kind():
        case "gpus":
            return {"accelerator": "gpu", "devices": num_ranks}
        case "shared":
            return {"accelerator": "pool", "devices": ["cuda:0"] * num_ranks}
        case "mixed":
            places = ["cuda:0" if rank % 2 == 0 else "cpu" for rank in range(num_ranks)]
            return {"accelerator": "pool", "devices": places}
    return {"accelerator": "cpu", "devices": num_ranks}


def one_device() -> dict[str, object]:
    """The Trainer's arguments for one plain device, of the type that rank 0 has."""
    return {"accelerator": "cpu" if kind() is None else "gpu", "devices": 1}


def environment(kind: str, delay_us: int = 0) -> dict[str, str]:
    """What the environment of a process has beside the usual, so that it starts with GPUs."""
    from standin.build import build

    path = [str(ON_PATH), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        SWITCH: kind,
        DELAY: str(delay_us),
        "LIGHTNING_GPP_STANDIN_LIBRARIES": str(build()),
        "PYTHONPATH": os.pathsep.join(path),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # it tells that kernels of CUDA are registered twice
    }


def switch_on() -> None:
    """Gives this process, which has not imported torch yet, and its children what the switch says.

    Raises:
        RuntimeError: the stand-in cannot be built here.
    """
    from standin.build import obstacle

    chosen = kind()
    if chosen is None:
        return
    if reason := obstacle():
        raise RuntimeError(reason)
    os.environ.update(environment(chosen, int(os.environ.get(DELAY, "0"))))
    sys.path.insert(0, str(ON_PATH))
    from standin_gpus.start import at_import_of_torch

    at_import_of_torch()
