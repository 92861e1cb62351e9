"""UCI Adult and the Criteo log: what is read, and what a broken file ends in."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from click_files import (
    CRITEO_HEADER,
    adult_row,
    criteo_row,
    write_adult,
    write_criteo,
    write_small_tables,
)

from lightning_gpp.recipes.dlrm import Adult, Clicks, Criteo, dlrm_data
from lightning_gpp.recipes.dlrm.criteo import CATEGORIES, INTEGERS, bucket

DATA_ROOT = os.environ.get("LIGHTNING_GPP_DATA")


def test_root_selects_the_data(tmp_path: Path) -> None:
    assert isinstance(dlrm_data(), Clicks)
    assert isinstance(dlrm_data(tmp_path, batch_size=5), Adult)


def test_batches_keep_the_fields_of_a_sample_together(tmp_path: Path) -> None:
    """In the small Criteo file the label is the parity of the first integer."""
    write_small_tables(tmp_path)
    data = Criteo(tmp_path, batch_size=3)
    data.setup()
    sizes = []
    for dense, categories, labels in data.train_dataloader():
        sizes.append(len(labels))
        assert torch.equal(dense[:, 0].exp().sub(1).round() % 2, labels)
        assert list(categories) == list(CATEGORIES)
        assert all(column.shape == labels.shape for column in categories.values())
    assert sizes == [3, 3, 2]


class TestAdult:
    def read(self, root: Path, **options: float) -> Adult:
        data = Adult(root, validation_fraction=0.5, **options)
        data.setup()
        return data

    def test_scale_and_vocabulary_come_from_the_training_samples(self, tmp_path: Path) -> None:
        """Every work class occurs once, so those of the validation samples are unknown."""
        words = list("abcdefgh")
        incomes = ["<=50K", ">50K"] * 4
        rows = [
            adult_row(10 * i, word, income=y) for i, (word, y) in enumerate(zip(words, incomes))
        ]
        write_adult(tmp_path, rows)
        data = self.read(tmp_path)
        assert data.features.table_sizes["workclass"] == 1 + 4
        assert data.features.table_sizes["sex"] == 1 + 1
        assert sorted(data.train_set.categories["workclass"].tolist()) == [1, 2, 3, 4]
        assert data.validation_set.categories["workclass"].tolist() == [0, 0, 0, 0]
        assert data.train_set.labels.tolist().count(1.0) == 2

    @pytest.mark.parametrize("gap", ["?", "", " ? "])
    def test_gap_is_index_0(self, tmp_path: Path, gap: str) -> None:
        write_adult(tmp_path, [adult_row(workclass=gap, income=y) for y in ["<=50K", ">50K"] * 2])
        data = self.read(tmp_path)
        assert data.features.table_sizes["workclass"] == 1
        assert data.train_set.categories["workclass"].tolist() == [0, 0]

    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            ([adult_row(), "1,2"], r"adult\.csv, line 3, column fnlwgt: got 2 fields, expected 15"),
            ([adult_row() + ",1"], r"line 2, column after income-per-year: got 16 fields"),
            ([adult_row("old")], r"line 2, column age: got 'old', expected a number"),
            ([adult_row("inf")], r"line 2, column age: got 'inf', expected a number"),
            ([adult_row("")], r"line 2, column age: got '', expected a number"),
            (
                [adult_row(), adult_row(income="50K")],
                r"line 3, column income-per-year: got '50K', expected <=50K or >50K",
            ),
            ([], r"adult\.csv holds no sample, expected at least one row"),
        ],
    )
    def test_broken_rows(self, tmp_path: Path, rows: list[str], message: str) -> None:
        write_adult(tmp_path, rows)
        with pytest.raises(ValueError, match=message):
            self.read(tmp_path)


class TestCriteo:
    def test_integers_gaps_and_buckets(self, tmp_path: Path) -> None:
        rows = [
            criteo_row(0, [7, "", -2, "260.0"], ["05db9164", "", "05db9164"]),
            criteo_row(1, [0], ["68fd1e64"]),
        ]
        write_criteo(tmp_path, rows * 2)
        data = Criteo(tmp_path, num_buckets=50, validation_fraction=0.5)
        data.setup()
        dense, categories, labels = data.train_set.__getitems__([0, 1])
        first = int((labels == 0).nonzero())
        numbers, gaps = dense[first].split(len(INTEGERS))
        expected = [math.log(8), 0.0, 0.0, math.log(261)] + [0.0] * 9
        assert numbers.tolist() == pytest.approx(expected)
        assert gaps.tolist() == [0, 1, 0, 0] + [1] * 9
        assert categories["C2"][first] == categories["C26"][first] == 0
        assert categories["C1"][first] == categories["C3"][first] == bucket("05db9164", 50)
        assert set(data.features.table_sizes.values()) == {50}
        assert data.features.num_dense == 26

    def test_first_rows_only(self, tmp_path: Path) -> None:
        write_criteo(tmp_path, [*(criteo_row(i % 2) for i in range(8)), ["broken"]])
        data = Criteo(tmp_path, max_rows=8, validation_fraction=0.5)
        data.setup()
        assert len(data.train_set) == len(data.validation_set) == 4

    @pytest.mark.parametrize(
        ("rows", "header", "message"),
        [
            ([["0", "1"]], CRITEO_HEADER, r"line 2, column I2: got 2 fields, expected 40"),
            ([[*criteo_row(), "x"]], CRITEO_HEADER, r"line 2, column after C26: got 41 fields"),
            ([criteo_row(2)], CRITEO_HEADER, r"line 2, column label: got '2', expected 0 or 1"),
            ([criteo_row(""), criteo_row()], None, r"line 1, column label: got '', expected 0"),
            ([criteo_row(0, ["a"])], None, r"line 1, column I1: got 'a', expected a number"),
            (
                [criteo_row()],
                CRITEO_HEADER.replace("I3", "J3"),
                r"line 1, column I3: got J3, expected the header",
            ),
            (
                [criteo_row()],
                CRITEO_HEADER.removesuffix(",C26"),
                r"line 1, column C26: got no column, expected the header",
            ),
        ],
    )
    def test_broken_rows(
        self, tmp_path: Path, rows: list[list[str]], header: str | None, message: str
    ) -> None:
        write_criteo(tmp_path, rows, header=header)
        with pytest.raises(ValueError, match=r"criteo_sample\.txt, " + message):
            Criteo(tmp_path).setup()


@pytest.mark.skipif(DATA_ROOT is None, reason="LIGHTNING_GPP_DATA is not set")
def test_real_files() -> None:
    adult = Adult(str(DATA_ROOT))
    adult.setup()
    labels = torch.cat([adult.train_set.labels, adult.validation_set.labels])
    assert (len(labels), int(labels.sum())) == (32_561, 7_841)
    assert adult.features.table_sizes["sex"] == 3
    occupations = torch.cat(
        [adult.train_set.categories["occupation"], adult.validation_set.categories["occupation"]]
    )
    assert int((occupations == 0).sum()) == 1_843
    criteo = Criteo(str(DATA_ROOT))
    criteo.setup()
    gaps = torch.cat([criteo.train_set.dense, criteo.validation_set.dense])[:, len(INTEGERS) :]
    assert gaps.sum(dim=0).tolist() == [90, 0, 34, 35, 6, 51, 10, 0, 10, 90, 10, 157, 35]
    assert np.isfinite(criteo.train_set.dense.numpy()).all()
