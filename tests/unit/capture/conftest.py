"""The same weights and inputs in every run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for pipelined.py


@pytest.fixture(autouse=True)
def same_weights() -> None:
    """Seeds the weights of the models of a test; tests/conftest.py restores the state."""
    torch.manual_seed(0)
