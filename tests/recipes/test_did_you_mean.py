"""What the console command says to options that it does not know."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_gpp import cli
from lightning_gpp.did_you_mean import suggestions

JOBS_THAT_PLAN = "job=compare, job=plan and job=simulate"


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (["recipe=multimodl"], ["recipe=multimodl: did you mean recipe=multimodal?"]),
        (["strategy.num_microbatch=8", "seed=1"],
         ["strategy.num_microbatch=8: did you mean strategy.num_microbatches=8?"]),
        (["-m", "seeds=1,2"], ["seeds=1,2: did you mean seed=1,2?"]),
        (["traner.devices=2"], ["traner.devices=2: did you mean trainer.devices=2?"]),
        (["graph=mmt", "cluster=summit"],
         [f"graph=mmt is an option of {JOBS_THAT_PLAN}",
          f"cluster=summit is an option of {JOBS_THAT_PLAN}"]),
        (["num_microbatches=4"],
         [f"num_microbatches=4 is an option of {JOBS_THAT_PLAN}; here it is "
          "strategy.num_microbatches=4"]),
        (["job=plan", "what_if.bandwidth=2"],
         ["what_if.bandwidth=2 is an option of job=simulate"]),
        (["strategy=gnnpipe", "strategy.chunk=8"],
         ["strategy.chunk=8: did you mean strategy.chunks=8?"]),
        (["+trainer.anything=1", "entirely.unlike=1"], []),
    ],
)  # fmt: skip
def test_suggestions(arguments: list[str], lines: list[str]) -> None:
    assert suggestions(arguments, "Could not override") == lines


def test_options_of_a_users_own_recipe_are_known(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("module:\n  _target_: mine.Net\n  breadth: 8\n")
    arguments = ["--config-dir", str(tmp_path), "recipe=mine", "recipe.module.bredth=3"]
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
    monkeypatch.setattr(sys, "argv", ["graphpipe", "recipe=dlmr", *more])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    assert capsys.readouterr().err.endswith("recipe=dlmr: did you mean recipe=dlrm?\n")
