"""Every configuration composes, and what it names exists."""

from __future__ import annotations

import importlib.resources
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
from click_files import write_small_tables
from graph_files import write_small_graphs
from hydra import compose, initialize_config_module
from hydra.errors import ConfigCompositionException, MissingConfigException
from hydra.utils import get_object, instantiate
from node_files import write_all_node_files
from omegaconf import DictConfig, OmegaConf

from lightning_gpp.recipes.dlrm import DLRM, Adult, Clicks
from lightning_gpp.recipes.gnn import BlockModel, GraphNetwork, Motifs, NodeNetwork, TUFiles
from lightning_gpp.recipes.multimodal import Digits, MultimodalClassifier, MultipleFeatures

CONFIGS = importlib.resources.files("lightning_gpp.configs")
CHOICES = sorted(
    f"{group.name}={choice.name.removesuffix('.yaml')}"
    for group in CONFIGS.iterdir()
    if group.is_dir() and group.name not in ("__pycache__", "experiment", "hparams_search")
    for choice in group.iterdir()
    if choice.name.endswith(".yaml")
)
NEEDED_BY = {f"data={name}": ("recipe=dlrm",) for name in ("adult", "clicks", "criteo", "dlrm")}
NEEDED_BY |= {f"data={name}": ("recipe=gnn",) for name in ("gnn", "motifs", "tu")}
NODE_DATA = ("coauthor", "flickr", "planetoid", "reddit", "sbm", "squirrel")
"""Data that are one graph."""
NEEDED_BY |= {f"data={name}": ("recipe=gnn",) for name in NODE_DATA}
NEEDED_BY |= {
    f"cluster={name}": ("job=plan",)
    for name in ("cpu", "dgx_a100", "dgx_h100", "summit", "uniform")
}
NEEDED_BY["cluster=from_file"] = ("job=plan", "cluster.path=cluster.yaml")
"""What else a choice takes: data belong to a recipe, clusters to a job that plans."""
MODULE_OF = {
    "recipe=dlrm": DLRM,
    "recipe=gnn": GraphNetwork,
    "recipe=multimodal": MultimodalClassifier,
    **{f"data={name}": NodeNetwork for name in NODE_DATA},
}
"""Whichever of these comes first among the choices says what the module is."""


def composed(*overrides: str) -> DictConfig:
    with initialize_config_module("lightning_gpp.configs", version_base="1.3"):
        return compose("config", overrides=["paths.output_dir=run", *overrides])


def resolved(config: DictConfig) -> dict[str, Any]:
    result: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    return result


@pytest.mark.parametrize(
    ("strategy", "default"), [("graphpipe", "graphpipe"), ("gnnpipe", "balanced")]
)
def test_the_planner_of_the_run_reaches_the_strategy(strategy: str, default: str) -> None:
    for overrides, expected in (((), default), (("planner=piper",), "piper")):
        config = composed(f"strategy={strategy}", *overrides)
        assert instantiate(config.strategy).settings.planner == expected


@pytest.mark.parametrize("choice", CHOICES)
def test_choice_composes_and_instantiates(
    choice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_small_tables(tmp_path)
    write_small_graphs(tmp_path)
    write_all_node_files(tmp_path)
    monkeypatch.setenv("LIGHTNING_GPP_DATA", str(tmp_path))
    config = composed(choice, *NEEDED_BY.get(choice, ()))
    assert resolved(config)
    data = instantiate(config.data)
    module = instantiate(config.recipe.module, data)
    pickle.loads(pickle.dumps((data, module)))  # as processes started by spawn get them
    given = [item for item in (choice, *NEEDED_BY.get(choice, ())) if item in MODULE_OF]
    assert type(module) is MODULE_OF[given[0] if given else "recipe=multimodal"]


@pytest.mark.parametrize("choice", CHOICES)
def test_says_what_it_is_for(choice: str) -> None:
    """The first line is a sentence; Hydra's line about the package may stand before it."""
    group, _, name = choice.partition("=")
    text = CONFIGS.joinpath(group, f"{name}.yaml").read_text().removeprefix("# @package _global_\n")
    sentence = text.partition("\n\n")[0].partition("\n_target_")[0]
    assert sentence.startswith("# ") and (set(sentence) & set(".?"))


@pytest.mark.parametrize(
    "choice",
    [choice for choice in CHOICES if choice.startswith(("logger=", "callbacks=", "trainer="))],
)
def test_options_are_those_of_the_classes(choice: str) -> None:
    """What cannot be built here (a GPU, a logger's package) is at least called as it can be."""
    config = composed(choice)
    for node in [config.trainer, *config.logger.values(), *config.callbacks.values()]:
        if node is None:
            continue
        options = {name for name in resolved(node) if name != "_target_"}
        parameters = inspect.signature(get_object(node._target_)).parameters
        others = any(item.kind is item.VAR_KEYWORD for item in parameters.values())
        assert options <= {*parameters} or others, node._target_


def test_the_root_selects_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIGHTNING_GPP_DATA", raising=False)
    assert isinstance(instantiate(composed().data), Digits)
    assert isinstance(instantiate(composed("data.root=data").data), MultipleFeatures)
    monkeypatch.setenv("LIGHTNING_GPP_DATA", "elsewhere")
    assert instantiate(composed().data).root == Path("elsewhere")
    assert isinstance(instantiate(composed("recipe=dlrm").data), Adult)
    monkeypatch.delenv("LIGHTNING_GPP_DATA")
    assert isinstance(instantiate(composed("recipe=dlrm").data), Clicks)
    assert isinstance(instantiate(composed("recipe=gnn").data), Motifs)
    assert isinstance(instantiate(composed("recipe=gnn", "data.root=data").data), TUFiles)


def test_command_of_the_readme() -> None:
    config = composed(
        "recipe=multimodal", "strategy.num_microbatches=8", "trainer.devices=4", "data.root=data"
    )
    assert config.strategy.num_microbatches == 8
    assert config.trainer.devices == 4


@pytest.mark.parametrize(("cores", "expected"), [(1, 2), (2, 2), (3, 3), (8, 4)])
def test_by_default_a_process_per_core(
    monkeypatch: pytest.MonkeyPatch, cores: int, expected: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(cores), raising=False)
    assert composed("recipe=multimodal").trainer.devices == expected


def test_unknown_recipe_lists_the_known() -> None:
    with pytest.raises(MissingConfigException, match="Could not find 'recipe/foo'") as caught:
        composed("recipe=foo")
    assert "multimodal" in str(caught.value)


def test_mistyped_option_is_refused() -> None:
    with pytest.raises(ConfigCompositionException, match=r"strategy\.num_microbatch"):
        composed("strategy.num_microbatch=8")


@pytest.mark.parametrize(
    ("choices", "module", "data"),
    [
        (["data=digits"], MultimodalClassifier, Digits),
        (["recipe=dlrm", "data=clicks"], DLRM, Clicks),
        (["recipe=gnn", "data=motifs"], GraphNetwork, Motifs),
        (["recipe=gnn", "data=sbm"], None, BlockModel),
    ],
)
def test_configs_say_what_the_classes_say(choices: list[str], module: Any, data: Any) -> None:
    """Options written out in the groups are the defaults of the classes."""
    config, plain = composed(*choices), data()
    found = instantiate(config.data)
    for name in resolved(config.data).keys() - {"_target_", "root"}:
        assert getattr(found, name) == getattr(plain, name), name
    if module is not None:
        made = instantiate(config.recipe.module, found)
        assert dict(made.hparams) == dict(module.for_data(plain).hparams)
