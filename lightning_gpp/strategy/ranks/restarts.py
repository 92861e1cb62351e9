"""Ranks that ``torchrun`` starts again."""

from __future__ import annotations

import os

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

_REMEDY = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Makes every round of ``torchrun`` have a store of its own."""


def warn_of_old_addresses() -> None:
    """Says how to start ``torchrun`` so that ranks that it starts again find each other.

    All rounds of a job share a store by default, with the same names: the ranks of a second round
    read there at which addresses those of the first one listened, and fail or wait (torch 2.13).
    """
    most = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if most != "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        rank_zero_warn(
            f"torchrun may start the ranks again (--max-restarts={most}), but they would look for "
            f"each other at addresses of before: set {_REMEDY}=1 where torchrun is started"
        )
