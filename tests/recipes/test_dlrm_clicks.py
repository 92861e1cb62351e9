"""The generated click log: its samples, and the AUC that can be reached on it."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_gpp.recipes.dlrm import Clicks
from lightning_gpp.recipes.dlrm.clicks import (
    BAG_MODES,
    VOCABULARIES,
    expected_auc,
    generate_clicks,
)


def test_the_seed_decides() -> None:
    first, again, other = (generate_clicks(200, 3, seed) for seed in (0, 0, 1))
    assert np.array_equal(first.arrays.labels, again.arrays.labels)
    assert np.array_equal(first.probabilities, again.probabilities)
    for name in VOCABULARIES:
        assert np.array_equal(first.arrays.categories[name], again.arrays.categories[name])
        assert not np.array_equal(first.arrays.categories[name], other.arrays.categories[name])


def test_categories_are_zipf_distributed() -> None:
    log = generate_clicks(20_000, 4, seed=0)
    for name, size in VOCABULARIES.items():
        column = log.arrays.categories[name]
        lowest = int(name in BAG_MODES)
        counts = np.bincount(column[column >= lowest], minlength=size + lowest)[lowest:]
        shares = np.arange(1, size + 1) ** -1.05
        expected = counts.sum() * shares / shares.sum()
        assert len(counts) == size
        assert (np.abs(counts - expected) < 6 * np.sqrt(expected) + 3).all(), name


def test_bags_are_filled_up_at_the_end() -> None:
    bags = generate_clicks(2_000, 5, seed=0).arrays.categories["tags"]
    lengths = (bags > 0).sum(axis=1)
    assert np.bincount(lengths).min() > 200  # empty ones and full ones among them
    assert all((bag[:length] > 0).all() for bag, length in zip(bags, lengths))


def test_labels_follow_the_probabilities() -> None:
    """The AUC of the probabilities on the drawn labels is the expected one, up to chance."""
    log = generate_clicks(20_000, 5, seed=2)
    labels, order = log.arrays.labels, log.probabilities.argsort()
    ranks = np.empty(len(order))
    ranks[order] = np.arange(1, len(order) + 1)
    positives = labels.sum()
    auc = (ranks[labels == 1].sum() - positives * (positives + 1) / 2) / (
        positives * (len(labels) - positives)
    )
    assert auc == pytest.approx(expected_auc(log.probabilities), abs=0.01)
    assert 0.2 < labels.mean() < 0.5


@pytest.mark.parametrize("options", [{"num_samples": 0}, {"bag_length": 0}])
def test_option_out_of_range(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Clicks(**options)
