"""What is cut and joined again is what it was; so are the gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_gpp.graph import Variation
from lightning_gpp.runtime.payload import pack, pack_gradients, unpack
from lightning_gpp.runtime.pieces import Cutter

NAMES = ("h", "place", "count", "length")
CUTTER = Cutter(
    {"h": (1,), "place": (None,), "count": (), "length": (), "pair": (0,)},
    {"place": Variation.SAME, "count": Variation.COUNT, "length": Variation.SAME},
)
SIZES = [1, 3]


def test_values_of_every_kind_survive():
    h, place = torch.randn(2, 8, 3), torch.randn(5, requires_grad=True)
    payload = pack([h, place, 4, 7])
    parts = CUTTER.cut(NAMES, payload, SIZES, backward=False)
    assert [unpack(part)[2:] for part in parts] == [[1, 7], [3, 7]]
    assert [part.tensors[0].shape for part in parts] == [(2, 2, 3), (2, 6, 3)]
    assert [part.requires_grad for part in parts] == [[False, True]] * 2
    joined = unpack(CUTTER.join(NAMES, parts, SIZES, backward=False))
    assert torch.equal(joined[0], h)
    assert torch.equal(joined[1], place)
    assert joined[2:] == [4, 7]


def test_gradients_of_what_is_the_same_for_all_are_added_up():
    ones = [pack_gradients([torch.ones(2, 2 * n, 3), torch.full((5,), float(n))]) for n in SIZES]
    joined = CUTTER.join(NAMES[:2], ones, SIZES, backward=True)
    assert joined.tensors[0].shape == (2, 8, 3)
    assert joined.tensors[1].tolist() == [4.0] * 5
    first, second = CUTTER.cut(NAMES[:2], joined, SIZES, backward=True)
    assert first.tensors[1].tolist() == [4.0] * 5
    assert second.tensors[1] is None


def test_rows_of_vertices_are_cut_and_joined_where_they_are():
    cutter = Cutter({"h": (1,)}, {"h": Variation.VERTICES})
    h = torch.randn(2, 4, 3)
    parts = cutter.cut(("h",), pack([h]), SIZES, backward=False)
    assert [part.tensors[0].shape[1] for part in parts] == SIZES
    joined = cutter.join(("h",), parts, SIZES, backward=False)
    assert torch.equal(unpack(joined)[0], h)


def test_what_should_be_the_same_and_is_not():
    parts = [pack([torch.full((5,), float(n))]) for n in SIZES]
    with pytest.raises(ValueError, match=r"'place' depended on no samples when .* differs"):
        CUTTER.join(("place",), parts, SIZES, backward=False)


@pytest.mark.parametrize(
    ("names", "values", "match"),
    [
        (("pair",), [(torch.ones(4), 4)], "'pair' holds plain numbers, which may be counts"),
        (("pair",), [(torch.ones(4), np.float64(4))], "'pair' holds plain numbers"),
        (("h",), [torch.ones(2, 7, 3)], "cannot be cut into micro-batches"),
        (("other",), [torch.ones(4)], "cannot be cut into micro-batches"),
        (("count", "h"), [6, torch.ones(2, 8, 3)], "'count' is 6 for 4 samples"),
    ],
)
def test_what_cannot_be_cut(names, values, match):
    with pytest.raises(ValueError, match=match):
        CUTTER.cut(names, pack(values), SIZES, backward=False)


def test_what_cannot_be_joined():
    parts = [pack([(torch.ones(n), name)]) for n, name in zip(SIZES, "ab", strict=True)]
    cutter = Cutter({"pair": (0,)})
    with pytest.raises(ValueError, match="'pair' differs between micro-batches"):
        cutter.join(("pair",), parts, SIZES, backward=False)
