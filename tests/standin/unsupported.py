"""What cannot run on the stand-in's GPUs, and why."""

from __future__ import annotations

import re

UNSUPPORTED: dict[str, str] = {
    r"sparse": "the stand-in has no sparse tensors on its devices",
    r"compile|scripted": "torch.compile makes kernels for a GPU that is not there",
    r"test_notebook": "kernels of notebooks start without this switch",
    r"test_an_error_in_one_pipeline": "a failed rank leaves sums behind, which NCCL aborts",
    r"test_faults.py.*(killed rank-|backward of one replica)": (
        "what waits on a stream for a rank that is gone ends the process, where NCCL is aborted"
    ),
    r"throughput and device statistics": "a GPU has other statistics than one CPU",
    r"emulation/test_emulated.py::test_training_equals": "emulated devices round as CPUs do",
    r"test_late_modules.py.*(random_models_begin|memory_of_every|from_files)": (
        "weights are drawn as on a CPU, mapped from files, or limited by the host's memory"
    ),
    r"test_a_slow_device_gets_less": "operators take random times, which hide what is slow",
    r"strategy/ranks/test_hosts": "the script's ranks name the CPU as their accelerator",
}
"""Patterns of test ids (``re.search``) and the reason for each."""


def reason_to_skip(test_id: str) -> str | None:
    """Why a test cannot run on the stand-in's GPUs, if it cannot."""
    for pattern, reason in UNSUPPORTED.items():
        if re.search(pattern, test_id):
            return f"on the stand-in's GPUs: {reason}"
    return None
