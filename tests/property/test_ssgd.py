"""S-SGD through the engine: the closed formulas of arXiv 1805.03812 and what follows from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpp.cluster import Link, all_reduce_s, uniform_cluster
from lightning_gpp.simulate.program_costs import StepCosts
from lightning_gpp.simulate.ssgd import VARIANTS, Layer, Ssgd

seconds = st.sampled_from([0.0, 1e-4, 3e-4, 1e-3, 7e-3, 0.02])
sizes = st.sampled_from([0, 4_000, 100_000, 3_000_000, 40_000_000])
layers_st = st.lists(st.builds(Layer, seconds, seconds, sizes), min_size=1)
links = st.builds(Link, st.sampled_from([1e8, 1e9, 2e10]), st.sampled_from([0.0, 1e-6, 1e-4]))


@st.composite
def cases(draw: st.DrawFn, num_devices: st.SearchStrategy[int]) -> Ssgd:
    count = draw(num_devices)
    step = StepCosts(
        data_s=draw(seconds),
        optimizer_s=dict.fromkeys(range(count), draw(seconds)),
    )
    cluster = uniform_cluster(count, draw(links))
    return Ssgd(draw(layers_st), cluster, step=step)


several = st.integers(2, 9)


class Formulas:
    """The paper's symbols for a case; layer ``l`` counts from the input."""

    def __init__(self, case: Ssgd) -> None:
        step = case.step
        self.io_s = step.data_s  # and t_h2d
        self.f_s = sum(layer.forward_s for layer in case.layers)
        self.b_s = [layer.backward_s for layer in case.layers]
        self.c_s = [
            all_reduce_s(case.cluster, range(case.cluster.num_devices), layer.gradient_bytes)
            for layer in case.layers
        ]
        self.u_s = step.optimizer_s[0]

    def not_hidden_s(self) -> float:
        """t_c^no by the recurrence of wait-free back-propagation."""
        backward_end_s = communication_end_s = 0.0
        for b_s, c_s in zip(reversed(self.b_s), reversed(self.c_s), strict=True):
            backward_end_s += b_s
            if c_s:
                communication_end_s = max(communication_end_s, backward_end_s) + c_s
        return max(0.0, communication_end_s - backward_end_s)


def step_s(case: Ssgd, variant: str) -> float:
    return replace(case, variant=variant).step_s


@given(cases(st.just(1)))
def test_one_device(case):
    """t = t_io + t_h2d + sum t_f + sum t_b + t_u."""
    f = Formulas(case)
    assert step_s(case, "naive") == pytest.approx(f.io_s + f.f_s + sum(f.b_s) + f.u_s)


@given(cases(several))
def test_naive(case):
    """The same, and sum t_c."""
    f = Formulas(case)
    whole_s = f.io_s + f.f_s + sum(f.b_s) + sum(f.c_s) + f.u_s
    assert step_s(case, "naive") == pytest.approx(whole_s, rel=1e-9)


@given(cases(st.integers(1, 9)))
def test_input_is_read_ahead(case):
    """max(t_io + t_h2d, sum t_f + sum t_b + sum t_c + t_u)."""
    f = Formulas(case)
    computing_s = f.f_s + sum(f.b_s) + sum(f.c_s) + f.u_s
    assert step_s(case, "pre-fetch") == pytest.approx(max(f.io_s, computing_s), rel=1e-9)


@given(cases(several))
def test_wait_free(case):
    """max(t_io + t_h2d, sum t_f + sum t_b + t_c^no + t_u)."""
    f = Formulas(case)
    computing_s = f.f_s + sum(f.b_s) + f.not_hidden_s() + f.u_s
    assert step_s(case, "wait-free") == pytest.approx(max(f.io_s, computing_s), rel=1e-9)


@given(cases(st.integers(1, 9)))
def test_every_variant_is_at_least_as_good_as_the_one_before(case):
    taken = [step_s(case, variant) for variant in VARIANTS]
    for before_s, after_s in zip(taken, taken[1:]):
        assert after_s <= before_s * (1 + 1e-9)


@given(cases(several))
def test_all_devices_are_alike(case):
    """Every device computes as much, and every gradient is summed once."""
    found = replace(case, variant="merged")
    total = sum(layer.gradient_bytes for layer in case.layers)
    assert sum(bucket.size_bytes for bucket in found.costs().buckets) == pytest.approx(total)
    rows = [[(a.kind, a.microbatch) for a in row] for row in found.program().actions]
    assert all(row == rows[0] for row in rows)
