"""Reading, splitting and scaling of the multimodal data."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from mfeat_files import write_mfeat, write_view

from lightning_gpp.recipes.multimodal import Digits, MultipleFeatures, multimodal_data
from lightning_gpp.recipes.split import stratified_split

DATA_ROOT = os.environ.get("LIGHTNING_GPP_DATA")
LABELS = np.arange(40) % 10


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_mfeat(tmp_path, MultipleFeatures.VIEW_SIZES, LABELS)
    return tmp_path


def test_rows_of_all_views_stay_together(root: Path) -> None:
    arrays = MultipleFeatures(root).read()
    assert {name: view.shape for name, view in arrays.views.items()} == {
        name: (40, size) for name, size in MultipleFeatures.VIEW_SIZES.items()
    }
    for view in arrays.views.values():
        assert np.array_equal(view.mean(axis=1).round(), arrays.labels)


def test_batches_keep_views_and_labels_of_a_sample_together(root: Path) -> None:
    data = MultipleFeatures(root, batch_size=7)
    data.setup()
    sizes = []
    for views, labels in data.train_dataloader():
        sizes.append(len(labels))
        order = views["pix"].mean(dim=1)
        # Features grow with the class, so sorting by feature must sort the labels.
        assert torch.equal(labels[order.argsort()], labels.sort().values)
        assert views["mor"].shape == (len(labels), 6)
    assert sizes == [7, 7, 7, 7, 2]


def test_root_selects_the_data_set(tmp_path: Path) -> None:
    assert isinstance(multimodal_data(), Digits)
    assert isinstance(multimodal_data(tmp_path), MultipleFeatures)


class TestErrors:
    def test_missing_file(self, root: Path) -> None:
        (root / "mfeat" / "mfeat-zer.csv").unlink()
        with pytest.raises(FileNotFoundError, match=r"mfeat-zer\.csv is not there.*data\.root"):
            MultipleFeatures(root).read()

    def test_missing_column(self, root: Path) -> None:
        write_view(root / "mfeat" / "mfeat-mor.csv", np.zeros((40, 5)), LABELS)
        with pytest.raises(ValueError, match=r"40 rows of 6 columns, expected .* 6 features"):
            MultipleFeatures(root).read()

    def test_unknown_class(self, root: Path) -> None:
        write_view(root / "mfeat" / "mfeat-mor.csv", np.zeros((40, 6)), LABELS + 1)
        with pytest.raises(ValueError, match="classes 0 to 9, it holds 1 to 10"):
            MultipleFeatures(root).read()


class TestSplit:
    def test_keeps_the_share_of_every_class(self) -> None:
        labels = np.repeat(np.arange(3), [10, 20, 30])
        train, validation = stratified_split(labels, 0.2, seed=0)
        assert np.bincount(labels[validation]).tolist() == [2, 4, 6]
        assert sorted([*train, *validation]) == list(range(60))

    def test_depends_on_the_seed_alone(self) -> None:
        first, again, other = (stratified_split(LABELS, 0.5, seed)[1] for seed in (0, 0, 1))
        assert np.array_equal(first, again)
        assert not np.array_equal(first, other)


def test_scale_comes_from_the_training_samples(root: Path) -> None:
    data = MultipleFeatures(root)
    data.setup()
    assert data.train_set is not None
    assert data.validation_set is not None
    for name in data.VIEW_SIZES:
        assert torch.allclose(data.train_set.views[name].mean(dim=0), torch.tensor(0.0), atol=1e-5)
        assert data.validation_set.views[name].shape == (10, data.VIEW_SIZES[name])


@pytest.mark.skipif(DATA_ROOT is None, reason="LIGHTNING_GPP_DATA is not set")
def test_real_files() -> None:
    arrays = MultipleFeatures(str(DATA_ROOT)).read()
    assert np.bincount(arrays.labels).tolist() == [200] * 10
    assert {name: view.shape[1] for name, view in arrays.views.items()} == dict(
        MultipleFeatures.VIEW_SIZES
    )
