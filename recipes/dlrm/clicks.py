"""A generated click log whose best possible AUC is known.

Users, items, contexts, tags and earlier items have hidden factors; how well they agree decides how
likely a click is. DLRM's dot products can express that, so a trained model must come close to the
AUC of the probabilities that the labels were drawn with (its Bayes AUC), and cannot exceed it by
more than chance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from ..split import IntArray, stratified_split
from .data import ClickArrays, ClickData, ClickSplit, Features

DoubleArray = npt.NDArray[np.float64]

NUM_DENSE = 4
NUM_FACTORS = 2
ZIPF_EXPONENT = 1.05
#: Different categories of each feature. Categories of bags are numbered from 1.
VOCABULARIES: Mapping[str, int] = MappingProxyType(
    {"user": 200, "item": 100, "context": 20, "tags": 30, "history": 100}
)
#: How the categories of a sample's bag act together.
BAG_MODES: Mapping[str, str] = MappingProxyType({"tags": "mean", "history": "sum"})
#: Pairs of features whose hidden factors are multiplied, and how much each pair counts.
PAIRS: Mapping[tuple[str, str], float] = MappingProxyType(
    {
        ("user", "item"): 1.0,
        ("user", "context"): 0.7,
        ("user", "tags"): 1.0,
        ("item", "history"): 0.4,
    }
)
BIAS = -1.0


@dataclass(frozen=True, slots=True, eq=False)
class ClickLog:
    """Generated samples and the probabilities with which their labels were drawn.

    Shapes:
        - ``probabilities``: ``(num_samples,)``
    """

    arrays: ClickArrays
    probabilities: DoubleArray


class Clicks(ClickData):
    """A generated click log; needs no file.

    Three categories and two bags (of up to ``bag_length`` categories, some of them empty) per
    sample, Zipf-distributed, and four dense features.

    Args:
        num_samples: samples in all.
        bag_length: most categories in a bag.
        seed: of the log; the same seed gives the same samples.
        options: the arguments of :class:`~lightning_gpp.recipes.in_memory.InMemoryData`.

    Raises:
        ValueError: ``num_samples`` or ``bag_length`` is not positive.
    """

    def __init__(
        self, num_samples: int = 40_000, bag_length: int = 5, seed: int = 0, **options: Any
    ) -> None:
        super().__init__(**options)
        if num_samples < 1 or bag_length < 1:
            raise ValueError(
                f"num_samples and bag_length must be at least 1, got {num_samples} and {bag_length}"
            )
        self.num_samples = num_samples
        self.bag_length = bag_length
        self.seed = seed
        self._validation_probabilities: DoubleArray | None = None

    def read(self) -> ClickSplit:
        """Generates and splits the log."""
        log = generate_clicks(self.num_samples, self.bag_length, self.seed)
        train, validation = stratified_split(
            log.arrays.labels, self.validation_fraction, self.split_seed
        )
        self._validation_probabilities = log.probabilities[validation]
        sizes = {name: size + (name in BAG_MODES) for name, size in VOCABULARIES.items()}
        features = Features(NUM_DENSE, sizes, dict(BAG_MODES))
        return ClickSplit(log.arrays.take(train), log.arrays.take(validation), features)

    @property
    def bayes_auc(self) -> float:
        """The AUC that the best possible model is expected to have on the validation samples."""
        self.setup()
        assert self._validation_probabilities is not None
        return expected_auc(self._validation_probabilities)


def generate_clicks(num_samples: int, bag_length: int, seed: int) -> ClickLog:
    """Draws hidden factors, samples and labels.

    The logit of a click is a bias, plus the products of :data:`PAIRS`, plus a linear function of
    the dense features. The factors of a bag are the mean or the sum of those of its categories.
    """
    generator = np.random.default_rng(seed)
    dense = generator.normal(size=(num_samples, NUM_DENSE)).astype(np.float32)
    categories: dict[str, IntArray] = {}
    factors: dict[str, DoubleArray] = {}
    for name, size in VOCABULARIES.items():
        hidden = generator.normal(size=(size + 1, NUM_FACTORS))
        if name in BAG_MODES:
            hidden[0] = 0.0
            categories[name] = zipf_bags(generator, size, num_samples, bag_length)
            factors[name] = bag_factors(hidden[categories[name]], categories[name], BAG_MODES[name])
        else:
            categories[name] = zipf(generator, size, (num_samples,))
            factors[name] = hidden[categories[name]]
    logits = BIAS + dense @ generator.normal(scale=0.5, size=NUM_DENSE)
    for (first, second), weight in PAIRS.items():
        logits = logits + weight * (factors[first] * factors[second]).sum(axis=1)
    probabilities = 1.0 / (1.0 + np.exp(-logits))
    labels = (generator.random(num_samples) < probabilities).astype(np.int64)
    return ClickLog(ClickArrays(dense, categories, labels), probabilities)


def zipf(generator: np.random.Generator, size: int, shape: tuple[int, ...]) -> IntArray:
    """Categories 0 to ``size - 1``, the k-th as often as 1 / (k + 1) to the Zipf exponent."""
    weights = np.arange(1, size + 1, dtype=np.float64) ** -ZIPF_EXPONENT
    return generator.choice(size, size=shape, p=weights / weights.sum())


def zipf_bags(
    generator: np.random.Generator, size: int, num_samples: int, bag_length: int
) -> IntArray:
    """Bags of 0 to ``bag_length`` categories from 1 to ``size``, filled up with 0 at the end."""
    members = 1 + zipf(generator, size, (num_samples, bag_length))
    lengths = generator.integers(bag_length + 1, size=(num_samples, 1))
    return np.where(np.arange(bag_length) < lengths, members, 0)


def bag_factors(members: DoubleArray, categories: IntArray, mode: str) -> DoubleArray:
    """Sum or mean of the hidden factors of the categories of each bag; 0 for an empty one.

    Shapes:
        - ``members``: ``(num_samples, bag_length, num_factors)``, 0 where ``categories`` is 0
    """
    total: DoubleArray = members.sum(axis=1)
    if mode == "sum":
        return total
    counts = (categories > 0).sum(axis=1, keepdims=True)
    mean: DoubleArray = total / np.maximum(counts, 1)
    return mean


def expected_auc(probabilities: DoubleArray) -> float:
    """Expected AUC of scoring each sample with its own probability of being positive.

    Over all pairs of a sample i and another one j: the weight of the pair is the probability that
    i is positive and j negative, and it is ordered rightly where i has the larger probability
    (half of it counts where they are equal).

    >>> expected_auc(np.array([0.0, 1.0])), expected_auc(np.array([0.5, 0.5]))
    (1.0, 0.5)
    """
    values, counts = np.unique(probabilities, return_counts=True)
    negatives = (1.0 - values) * counts
    below = np.concatenate([[0.0], np.cumsum(negatives)[:-1]])
    ties = (counts - 1) * (1.0 - values)
    ordered = values * counts * (below + 0.5 * ties)
    pairs = values * counts * (negatives.sum() - (1.0 - values))
    return float(ordered.sum() / pairs.sum())
