"""What cannot run on the stand-in's GPUs, and why."""

from __future__ import annotations

import re

UNSUPPORTED: dict[str, str] = {
    r"sparse": "the stand-in has no sparse tensors on its devices",
    r"compile|scripted": "torch.compile makes kernels for a GPU that is not there",
    r"test_notebook": "kernels of notebooks start without this switch",
    r"test_faults.py.*weights_are_lost": "it gives a module on GPUs a batch of the CPU",
    r"test_families.py.*\[encoder": "it makes nested tensors, which the stand-in lacks",
    r"test_families.py.*\[vision|\[mamba": "the stand-in has no kernel of depthwise convolutions",
    r"test_a_graph_that_changes": "it changes a batch behind torch's back, as NumPy can on a CPU",
    r"test_the_users_step_is_between_the_halves.gpipe": "it counts on a plan by times of a CPU",
    r"test_installation_alone": "Lightning takes a GPU by itself where there is one",
    r"UncountedLate": "that is an error on GPUs, which tests/standin expects",
    r"planning/.*(may_stay_idle|verdict_waits|ends_before_says)": "it is about CPUs alone",
    r"throughput and device statistics": "a GPU has other statistics than one CPU",
    r"emulation/test_emulated.py::test_training_equals": "emulated devices round as CPUs do",
    r"test_late_modules.py.*(random_models_begin|memory_of_every|from_files)": (
        "weights are drawn as on a CPU, mapped from files, or limited by the host's memory"
    ),
    r"test_a_loss_that_is_no_mean.*in float32": (
        "a GPU may compute convolutions in TF32, whose rounding is larger than this term"
    ),
}
"""Patterns of test ids (``re.search``) and the reason for each."""


def reason_to_skip(test_id: str) -> str | None:
    """Why a test cannot run on the stand-in's GPUs, if it cannot."""
    for pattern, reason in UNSUPPORTED.items():
        if re.search(pattern, test_id):
            return f"on the stand-in's GPUs: {reason}"
    return None
