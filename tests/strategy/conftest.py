"""Tests of the strategy run in an empty folder of their own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def in_run_folder(run_folder: Path) -> Path:
    """Changes to an empty working directory."""
    return run_folder
