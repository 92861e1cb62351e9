"""README and ``docs/``: links lead somewhere, commands compose, snippets run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from helpers.documents import (
    PAGES,
    ROOT,
    Snippet,
    anchors,
    commands,
    links,
    scripts,
    snippets,
)
from helpers.published import PIPEDREAM, piper_document, write_piper
from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from lightning.pytorch import Trainer

from lightning_gpp import EmulatedAccelerator, GNNPipeStrategy, GraphPipeStrategy, TimelineCallback
from lightning_gpp.cluster import cluster_preset
from lightning_gpp.planner import plan_request
from lightning_gpp.recipes.multimodal import Digits, MultimodalClassifier
from lightning_gpp.strategy import HAPStrategy
from lightning_gpp.workloads import WORKLOADS

FLAGS = {"-m": 0, "--help": 0, "--cfg": 1, "--config-dir": 1, "-sc": 1}
"""Flags of the command that pages show, and how many words each takes."""

named = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@named
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


@named
def test_scripts_are_there(page: Path) -> None:
    assert not [name for name in scripts(page) if not (ROOT / name).is_file()]


@named
def test_blocks_are_closed(page: Path) -> None:
    """An open one swallows the rest of a page, snippets and all."""
    fences = [line.strip() for line in page.read_text().splitlines() if line.strip()[:3] == "```"]
    assert all(opening != "```" for opening in fences[::2])
    assert all(closing == "```" for closing in fences[1::2]) and len(fences) % 2 == 0


def test_every_page_is_in_the_table_of_contents() -> None:
    listed = set((ROOT / "docs" / "index.md").read_text().split())
    assert {page.stem for page in PAGES if page.parent.name == "docs"} - listed == {"index"}


def test_the_readme_is_short() -> None:
    assert (ROOT / "README.md").read_text().count("\n") <= 160


def test_extras_are_there() -> None:
    text = "".join(page.read_text() for page in PAGES)
    project = (ROOT / "pyproject.toml").read_text()
    known = [
        name for name in ("dev", "docs", "metis", "sweep", "test") if f"\n{name} = [" in project
    ]
    shown = set(re.findall(r'"\.\[(\w+)\]"', text))
    assert {"docs", "sweep", "test"} <= shown <= {*known}


COMMANDS = sorted({(" ".join(words), place) for page in PAGES for place, words in commands(page)})


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 40
    assert any(text.startswith("job=simulate") for text, _ in COMMANDS)


@pytest.mark.filterwarnings("ignore:The ``declarative_base")  # sqlalchemy below optuna
def test_commands_compose(tmp_path: Path) -> None:
    """Every option exists, every choice is there; of a sweep the first job."""
    (tmp_path / "recipe").mkdir()
    (own,) = [text for text in yaml_texts("docs/command_line.md") if "takes_data" in text]
    (tmp_path / "recipe" / "mine.yaml").write_text(own)
    path = [f"hydra.searchpath=[file://{tmp_path}]"]
    parser = OverridesParser.create()
    with initialize_config_module("lightning_gpp.configs", version_base="1.3"):
        for page in PAGES:
            for place, words in commands(page):
                overrides = [first_of(parser, word) for word in without_flags(words)]
                try:
                    compose("config", overrides=[*overrides, *path], return_hydra_config=True)
                except Exception as error:
                    pytest.fail(f"{place}: graphpipe {' '.join(words)}: {error}")


def without_flags(words: list[str]) -> list[str]:
    """The options of a command."""
    kept, index = [], 0
    while index < len(words):
        if words[index].startswith("-"):
            index += FLAGS[words[index]]
        else:
            kept.append(words[index])
        index += 1
    return kept


def first_of(parser: OverridesParser, word: str) -> str:
    """An override with the first of the values that a sweep goes through."""
    override = parser.parse_override(word)
    if not override.is_sweep_override():
        return word
    return f"{override.get_key_element()}={next(iter(override.sweep_string_iterator()))}"


def yaml_texts(name: str) -> list[str]:
    return [snippet.text for snippet in snippets(ROOT / name, "yaml")]


@named
def test_yaml_is_yaml(page: Path) -> None:
    for snippet in snippets(page, "yaml"):
        assert yaml.safe_load(snippet.text), snippet.place


PYTHON = [snippet for page in PAGES for snippet in snippets(page, "python")]
NEEDS_DEVICES = "cuda:"
"""In a snippet: it cannot run here."""


class Fitted(Trainer):
    """A Trainer that is put together, and trains nothing."""

    fit = mock.Mock()


@pytest.mark.parametrize("snippet", PYTHON, ids=lambda snippet: snippet.place)
@pytest.mark.filterwarnings("ignore:.*does not have many workers|.*GPU available")
def test_snippets_run(
    snippet: Snippet, run_folder: Path, monkeypatch: pytest.MonkeyPatch, names: dict[str, Any]
) -> None:
    """Classes, functions and options are as the pages say; nothing is trained."""
    monkeypatch.setattr("lightning.pytorch.Trainer", Fitted)
    Path("graph.txt").write_text(PIPEDREAM)
    write_piper(Path("piper.json"), piper_document())
    code = compile(snippet.text, snippet.place, "exec")
    if NEEDS_DEVICES not in snippet.text:
        exec(code, {"__name__": "snippet", **names})


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What pages take as known from what they said before."""
    import lightning
    import torch
    from torch.utils.data import DataLoader

    from lightning_gpp import make_plan

    data = Digits()
    workload = WORKLOADS["mmt"]()
    cluster = cluster_preset("summit", num_devices=4)
    plan = make_plan(
        workload.graph,
        cluster,
        planner="balanced",
        minibatch_size=4096,
        costs=workload.costs_for(cluster),
    )
    return {
        "DataLoader": DataLoader,
        "EmulatedAccelerator": EmulatedAccelerator,
        "F": torch.nn.functional,
        "GNNPipeStrategy": GNNPipeStrategy,
        "GraphPipeStrategy": GraphPipeStrategy,
        "HAPStrategy": HAPStrategy,
        "L": lightning,
        "TimelineCallback": TimelineCallback,
        "Trainer": Fitted,
        "cluster": cluster,
        "data": data,
        "mlp": torch.nn.Linear,
        "module": MultimodalClassifier.for_data(data),
        "nn": torch.nn,
        "plan": plan,
        "request": plan_request(workload.graph, cluster, minibatch_size=4096),
        "torch": torch,
        "workload": workload,
    }
