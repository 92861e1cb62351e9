"""The examples in docstrings run, in every module of the package."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import lightning_gpp
import lightning_gpp.recipes

MODULES = sorted(
    {
        module.name
        for package in (lightning_gpp, lightning_gpp.recipes)
        for module in pkgutil.walk_packages(package.__path__, prefix=f"{package.__name__}.")
    }
)


def test_all_rooms_are_searched() -> None:
    assert {"lightning_gpp.graph.stage_graph", "lightning_gpp.recipes.multimodal.data"} <= set(
        MODULES
    )


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
