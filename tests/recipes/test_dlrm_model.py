"""The DLRM recipe in plain Lightning, on one device."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from helpers.training import make_trainer
from lightning.pytorch import Trainer, seed_everything

from lightning_gpp.recipes.dlrm import DLRM, Adult, ClickData, Clicks
from lightning_gpp.recipes.multimodal import Digits, MultimodalClassifier

DATA_ROOT = os.environ.get("LIGHTNING_GPP_DATA")
CATEGORIES = {"user": torch.tensor([3, 0, 9]), "tags": torch.tensor([[1, 4], [2, 0], [0, 0]])}


def small_model(**options: object) -> DLRM:
    seed_everything(0, verbose=False)
    model = DLRM(3, {"user": 10, "tags": 5}, {"tags": "mean"}, embedding_width=4, **options)  # type: ignore[arg-type]
    return model.double()


def trained(data: ClickData, folder: Path, *, max_epochs: int) -> dict[str, float]:
    seed_everything(0, verbose=False)
    trainer = make_trainer(None, max_epochs=max_epochs, default_root_dir=folder)
    trainer.fit(DLRM.for_data(data), datamodule=data)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_forward_equals_the_formula() -> None:
    model = small_model()
    dense = torch.randn(3, 3, dtype=torch.double)
    for i in range(3):
        bottom = model.bottom(dense[i])
        user = model.tables["user"].weight[CATEGORIES["user"][i]]
        tags = [tag for tag in CATEGORIES["tags"][i].tolist() if tag]
        rows = model.tables["tags"].weight[tags]
        bag = rows.mean(dim=0) if tags else torch.zeros(4, dtype=torch.double)
        products = torch.stack([user @ bottom, bag @ bottom, bag @ user])
        expected = model.top(torch.cat([bottom, products]))
        assert torch.allclose(model(dense, CATEGORIES)[i], expected[0], rtol=1e-12)


def test_comes_close_to_the_bayes_auc(run_folder: Path) -> None:
    data = Clicks()
    reached = trained(data, run_folder, max_epochs=8)["val_auc"]
    assert data.bayes_auc > 0.84
    assert data.bayes_auc - 0.03 < reached < data.bayes_auc + 0.01


@pytest.mark.skipif(DATA_ROOT is None, reason="LIGHTNING_GPP_DATA is not set")
def test_learns_real_incomes(run_folder: Path) -> None:
    assert trained(Adult(str(DATA_ROOT)), run_folder, max_epochs=3)["val_auc"] >= 0.90


def test_checkpoint_builds_the_model_again(tmp_path: Path) -> None:
    model = small_model(sparse_gradients=True, optimizer={"name": "SGD", "lr": 0.1})
    trainer = Trainer(logger=False, default_root_dir=tmp_path, accelerator="cpu")
    trainer.strategy.connect(model)
    trainer.save_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    again = DLRM.load_from_checkpoint(tmp_path / "model.ckpt").double()
    assert isinstance(again.configure_optimizers(), torch.optim.SGD)
    assert again.tables["tags"].sparse
    dense = torch.randn(3, 3, dtype=torch.double)
    assert torch.allclose(again(dense, CATEGORIES), model(dense, CATEGORIES), atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, {"a": 2}), "num_dense must be at least 1, got 0"),
        ((1, {}), "at least one categorical feature"),
        ((1, {"a": 2}, {"b": "sum"}), r"bag_modes\['b'\] is 'sum'.*table_sizes \(a\)"),
        ((1, {"a": 2}, {"a": "max"}), r"bag_modes\['a'\] is 'max'; expected one of mean, sum"),
    ],
)
def test_features_that_make_no_model(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DLRM(*arguments)  # type: ignore[arg-type]


def test_data_of_another_recipe_are_refused() -> None:
    with pytest.raises(TypeError, match=r"dlrm got data of type Digits; expected data=adult"):
        DLRM.for_data(Digits())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"recipe multimodal got data of type Clicks"):
        MultimodalClassifier.for_data(Clicks())  # type: ignore[arg-type]
