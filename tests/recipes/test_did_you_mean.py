"""What the console command says to options that it does not know."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_gpp import cli
from lightning_gpp.jobs.did_you_mean import Known, known_options, suggestion, suggestions

JOBS_THAT_PLAN = "job=compare, job=plan, job=simulate"


@pytest.fixture(scope="module")
def known() -> Known:
    return known_options({}, None)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("job", "option", "line"),
    [
        ("train", "recipe=multimodal", None),
        ("train", "strategy.num_microbatch=8",
         "strategy.num_microbatch=8: did you mean strategy.num_microbatches=8?"),
        ("train", "seeds=1,2", "seeds=1,2: did you mean seed=1,2?"),
        ("train", "traner.devices=2", "traner.devices=2: did you mean trainer.devices=2?"),
        ("train", "graph=mmt", f"graph=mmt is an option of {JOBS_THAT_PLAN}"),
        ("train", "cluster=summit", f"cluster=summit is an option of {JOBS_THAT_PLAN}"),
        ("train", "num_microbatches=4", f"num_microbatches=4 is an option of {JOBS_THAT_PLAN}"),
        ("train", "experiment=anything", None),
        ("plan", "what_if.bandwidth=2", "what_if.bandwidth=2 is an option of job=simulate"),
        ("plan", "graph=mmt", None),
        ("train", "entirely.unlike=1", None),
        ("train", "trainer.limit_train_batches=1", None),
    ],
)  # fmt: skip
def test_suggestion(job: str, option: str, line: str | None, known: Known) -> None:
    name, _, value = option.partition("=")
    assert suggestion(name, value, job, known) == line


def test_options_are_those_of_the_groups_that_were_chosen() -> None:
    arguments = ["strategy=gnnpipe", "strategy.chunk=8", "+trainer.anything=1"]
    assert suggestions(arguments, "") == ["strategy.chunk=8: did you mean strategy.chunks=8?"]


def test_options_of_a_users_own_recipe_are_known(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("module:\n  _target_: mine.Net\n  breadth: 8\n")
    arguments = [
        "--config-dir",
        str(tmp_path),
        "recipe=mine",
        "data=digits",
        "recipe.module.bredth=3",
    ]
    assert suggestions(arguments, "") == [
        "recipe.module.bredth=3: did you mean recipe.module.breadth=3?"
    ]


def test_a_missing_plugin_names_its_extra() -> None:
    (line,) = suggestions(["hparams_search=optuna"], "Could not find 'hydra/sweeper/optuna'")
    assert 'pip install "lightning_gpp[sweep]"' in line


@pytest.mark.parametrize("more", [[], ["--help"]])
def test_the_command_says_it_last(
    more: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr(sys, "argv", ["graphpipe", "sead=1", *more])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    assert capsys.readouterr().err.endswith("sead=1: did you mean seed=1?\n")
