"""Micro-batches of different sizes, and losses that are no means of theirs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.jobs import lines_of_fit
from helpers.masked import MaskedData, MaskedModel
from helpers.models import DataSpec
from helpers.modules import (
    ChainModel,
    ComparingModel,
    DroppingComparingModel,
    DroppingModel,
)
from helpers.reference import assert_equal_training
from helpers.training import Training
from helpers.workers import WorkerPool
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpp.strategy.cutting.microbatches import (
    batch_size,
    cut_batch,
    microbatch_sizes,
    resized_batch,
    unit_sizes,
)

LAYERS = [f"layers.{number}" for number in range(6)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("multiples", [(1, 2, 4), (4, 2, 1), (2, 1, 2)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_with_microbatches_of_their_own_size(
    pool: WorkerPool, multiples: tuple[int, ...], schedule: str
) -> None:
    rows = (["layers.0", "layers.1"], ["layers.2", "layers.3"], ["layers.4", "layers.5"])
    plan = [
        {"modules": row, "microbatch_multiple": multiple}
        for row, multiple in zip(rows, multiples, strict=True)
    ]
    training = Training(ChainModel, DataSpec(dtype="float64"))
    assert_equal_training(
        pool, training, num_ranks=3, num_microbatches=4, plan=plan, schedule=schedule
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("as_labels", [True, False], ids=["labels", "mask"])
@pytest.mark.parametrize("counts", [(3,) * 8, (3, 3, 3, 3, 3, 6, 3, 1)])
def test_a_mean_over_uneven_counts(
    pool: WorkerPool, counts: tuple[int, ...], as_labels: bool
) -> None:
    data = MaskedData(counts=counts, as_labels=as_labels)
    training = Training(MaskedModel, data, num_steps=3, validate=False)
    assert_equal_training(pool, training, num_ranks=2, num_microbatches=4)


@pytest.mark.parametrize(
    ("stages", "is_cut"),
    [
        ([{"modules": LAYERS, "devices": [0, 1]}], False),
        ([{"modules": LAYERS[:3]}, {"modules": LAYERS[3:]}], False),
        # The stage that compares takes both micro-batches at a time.
        ([{"modules": LAYERS[:3]}, {"modules": LAYERS[3:], "microbatch_multiple": 2}], True),
    ],
)
def test_a_forward_that_compares_samples_sees_whole_batches(
    pool: WorkerPool, stages: list[dict[str, object]], is_cut: bool
) -> None:
    training = Training(ComparingModel, DataSpec(dtype="float64"), num_steps=6, validate=False)
    strategy = {"num_microbatches": 2, "plan": stages}
    assert_equal_training(pool, training, num_ranks=2, **strategy)
    first, second = pool.run(lines_of_fit, training, strategy, 2, num_ranks=2)
    found = [line for line in first if "in one piece, as" in line]
    assert len(found) == (not is_cut), first
    assert not second


@pytest.mark.parametrize("build", [DroppingModel, DroppingComparingModel])
def test_a_forward_that_draws_is_judged_by_its_evaluation_mode(
    pool: WorkerPool, build: type
) -> None:
    training = Training(build, DataSpec(dtype="float64"), num_steps=1, validate=False)
    strategy = {
        "num_microbatches": 2,
        "plan": [{"modules": LAYERS[:3]}, {"modules": LAYERS[3:]}],
    }
    first, _ = pool.run(lines_of_fit, training, strategy, 2, num_ranks=2)
    found = [line for line in first if "in one piece, as" in line]
    assert len(found) == (build is DroppingComparingModel), first


def test_cut_batch_keeps_the_structure() -> None:
    batch = {"x": torch.arange(5), "names": ["a", "b"], "pair": (torch.ones(5, 2), None), "n": 3}
    parts = cut_batch(batch, microbatch_sizes(5, 2))
    assert [part["x"].tolist() for part in parts] == [[0, 1, 2], [3, 4]]
    assert [part["names"] for part in parts] == [["a", "b"], ["a", "b"]]
    assert [part["pair"][0].shape for part in parts] == [(3, 2), (2, 2)]
    assert all(part["n"] == 3 and part["pair"][1] is None for part in parts)


@pytest.mark.parametrize(("num_samples", "taken"), [(2, "ab"), (5, "abcde"), (7, "abcdeab")])
def test_batches_of_other_sizes_have_the_first_samples_over_and_over(
    num_samples: int, taken: str
) -> None:
    batch = {"x": torch.arange(5), "a": np.arange(5), "n": 3}
    found = resized_batch(batch, num_samples)
    places = ["abcde".index(letter) for letter in taken]
    assert found["x"].tolist() == found["a"].tolist() == places
    assert found["n"] == 3


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (([torch.ones(4), torch.ones(4)], torch.ones(4, 2)), 4),
    ],
)
def test_the_number_of_samples(batch: object, size: int) -> None:
    assert batch_size(batch) == size


@pytest.mark.parametrize(
    "batch",
    [
        (torch.ones(4, 10), torch.ones(4, dtype=torch.int64), torch.ones(3)),
        (torch.ones(2, 3), [torch.ones(5), torch.ones(2), torch.ones(4)]),
        (tuple(torch.ones(3, 4, 4) for _ in range(5)), torch.arange(5)),
    ],
)
def test_tensors_that_do_not_agree(batch: object) -> None:
    with pytest.raises(ValueError, match="cannot be cut into micro-batches"):
        batch_size(batch)


@pytest.mark.parametrize(
    "items",
    [[[1, 2], [], [3]], ("a", "b", "c"), [torch.tensor(number) for number in range(3)]],
    ids=["lists", "texts", "numbers in tensors"],
)
def test_lists_of_samples_are_not_cut(items: object) -> None:
    with pytest.raises(TypeError, match=r"batch\['items'\] is a .* with an item per sample"):
        batch_size({"x": torch.arange(3), "items": items})
    assert batch_size({"x": torch.arange(1), "items": ["a"]}) == 1


def test_batches_that_cannot_be_cut() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    with pytest.raises(TypeError, match=r"batch\['s'\] is a PackedSequence"):
        batch_size({"x": torch.ones(5), "s": packed})
    with pytest.raises(ValueError, match=r"batch\['b'\] has 3 rows, the first tensor 2"):
        batch_size({"a": torch.ones(2), "b": torch.ones(3)})
    offsets, indices = [torch.tensor([0, 2, 3, 5])], [torch.arange(7)]
    with pytest.raises(ValueError, match=r"batch\[2\]\[0\] has 7.*Pad bags"):
        batch_size((torch.ones(4, 3), offsets, indices))
    with pytest.raises(ValueError, match="no tensor"):
        batch_size({"n": 3})
    with pytest.raises(TypeError, match=r"batch\[1\] is a set"):
        batch_size([torch.ones(2), {1, 2}])


@pytest.mark.parametrize(
    ("num_samples", "sizes"),
    [
        (10, [2, 2, 1, 1, 1, 1, 1, 1]),  # the full batch: as many as asked
        (9, [2, 1, 1, 1, 1, 1, 1, 1]),
        (3, [1, 1, 1]),
    ],
)
def test_a_full_batch_gets_as_many_microbatches_as_asked(
    num_samples: int, sizes: list[int]
) -> None:
    assert unit_sizes(num_samples, full=10, asked=8, at_a_time=1) == sizes


def test_a_smaller_batch_keeps_the_size_of_microbatches() -> None:
    # BatchNorm needs more than one sample: 6 of 8 samples make three pairs, not four pieces.
    assert unit_sizes(6, full=8, asked=4, at_a_time=1) == [2, 2, 2]
    assert unit_sizes(9, full=16, asked=4, at_a_time=1) == [3, 3, 3]


def test_no_sample_of_a_smaller_batch_is_left_alone() -> None:
    assert unit_sizes(7, full=8, asked=4, at_a_time=1) == [3, 2, 2]
    assert unit_sizes(3, full=8, asked=4, at_a_time=1) == [3]
    assert unit_sizes(5, full=8, asked=4, at_a_time=4) == [3, 2]  # not all replicas get some
    assert unit_sizes(3, full=8, asked=4, at_a_time=4) == [3]


@pytest.mark.parametrize("at_a_time", [1, 4])
def test_a_batch_without_samples_is_one_piece(at_a_time: int) -> None:
    assert unit_sizes(0, full=8, asked=4, at_a_time=at_a_time) == [0]
    assert unit_sizes(0, full=0, asked=4, at_a_time=at_a_time) == [0]


@given(
    full=st.integers(1, 60),
    asked=st.integers(1, 20),
    at_a_time=st.sampled_from([1, 2, 3, 4, 6]),
    data=st.data(),
)
def test_units_of_any_batch(full: int, asked: int, at_a_time: int, data: st.DataObject) -> None:
    num_samples = data.draw(st.integers(1, full), label="num_samples")
    of_full = unit_sizes(full, full=full, asked=asked, at_a_time=at_a_time)
    sizes = unit_sizes(num_samples, full=full, asked=asked, at_a_time=at_a_time)
    assert sum(sizes) == num_samples
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) <= len(of_full)
    smallest = min(2, *of_full) if len(of_full) > 1 else min(2, full)
    if num_samples >= smallest:
        assert min(sizes) >= smallest
    if num_samples >= smallest * at_a_time:
        assert len(sizes) % at_a_time == 0
    if asked % at_a_time == 0 and asked <= full:
        assert len(of_full) == asked


class Mirrored(dict):  # type: ignore[type-arg]
    """Keeps entries as attributes, too, and cannot be updated, as outputs of transformers."""

    def __setitem__(self, key: str, value: object) -> None:
        super().__setitem__(key, value)
        setattr(self, key, value)

    def update(self, *_: object) -> None:
        raise TypeError("not this way")


def test_mappings_get_their_entries_one_by_one() -> None:
    batch = Mirrored()
    batch["x"] = torch.arange(4)
    for part, expected in zip(cut_batch(batch, [2, 2]), ([0, 1], [2, 3]), strict=True):
        assert part["x"].tolist() == part.x.tolist() == expected
