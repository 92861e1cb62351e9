"""Every case of the tables: one device, 2 and 4 ranks, other plans and schedules, one result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.alike import differences
from helpers.workers import WorkerPool

from conformance.case import SLOWER, SPMD, Case, Noted, cases_of, perform
from conformance.conftest import Table

pytestmark = [
    pytest.mark.timeout(400 * SLOWER),
    # A batch without a sample of some class, for example, on one device, too.
    pytest.mark.filterwarnings("ignore::UserWarning:torchmetrics.utilities.prints"),
    # torch's compiler looks at the gradients of all that it meets.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

TABLES = (
    "cases_adversarial",
    "cases_asides",
    "cases_batches",
    "cases_callbacks",
    "cases_calls",
    "cases_evaluation",
    "cases_forwards",
    "cases_hooks",
    "cases_logging",
    "cases_loops",
    "cases_losses",
    "cases_manual",
    "cases_once",
    "cases_precision",
    "cases_raised",
    "cases_shown",
)
ROWS = [
    pytest.param(name, case, id=f"{name.removeprefix('cases_')}: {case.name}")
    for name in TABLES
    for case in cases_of(name)
]
DRAWN = ROWS[::4]
"""Run with random plans, too."""
NEVER_CUT = {
    f"cases_{name}" for name in ("adversarial", "calls", "losses", "manual", "once", "raised")
}
"""About steps that need the whole batch, several calls of the forward, or manual optimization.

Or about errors, which leave a module whole in the default mode only.
"""
CUT = [row for row in ROWS if row.values[0] not in NEVER_CUT and not row.values[1].only_whole]
LOGGED = [row for row in CUT if row.values[0] == "cases_logging"]
PER_MICROBATCH = LOGGED + [row for row in CUT if row not in LOGGED][::3]
"""Run with steps for every micro-batch, too; what is logged depends most on how batches are cut."""
ON_FOUR = ROWS[1::2]
"""Run on four ranks, too: half of them, as they take the most time."""
ON_DATA = frozenset(
    {
        *("packed", "packed before", "a branch on data", "rows selected by data"),
        *("scripted child", "child compiled in place", "child of torch.compile"),
    }
)
"""Forwards whose Python depends on data, or is none: no graph of operators; refused by ``hap``."""
WITHOUT_DATA = [
    row
    for row in ROWS
    if row.values[0] != "cases_precision"  # SPMD programs refuse autocast
    and (row.values[0] != "cases_forwards" or row.values[1].name not in ON_DATA)
]
_expected: dict[tuple[str, str], Noted] = {}


@pytest.mark.parametrize(("name", "case"), ROWS)
def test_as_on_one_device(
    pool: WorkerPool, table: Callable[..., Table], name: str, case: Case, tmp_path: Path
) -> None:
    check(name, case, table(name).on_ranks(pool, case, 2), tmp_path)


@pytest.mark.parametrize(("name", "case"), ON_FOUR)
def test_on_four_ranks(
    pool: WorkerPool, table: Callable[..., Table], name: str, case: Case, tmp_path: Path
) -> None:
    check(name, case, table(name).on_ranks(pool, case, 4), tmp_path)


@pytest.mark.parametrize(("name", "case"), DRAWN)
def test_any_plan_does(
    pool: WorkerPool, table: Callable[..., Table], name: str, case: Case, tmp_path: Path
) -> None:
    """Which plan a run gets depends on measured times; its results do not."""
    check(name, case, table(name, draws_plans=True).on_ranks(pool, case, 3), tmp_path)


@pytest.mark.parametrize(("name", "case"), PER_MICROBATCH)
def test_with_a_step_for_every_micro_batch(
    pool: WorkerPool, table: Callable[..., Table], name: str, case: Case, tmp_path: Path
) -> None:
    check(name, case, table(name, schedule="1f1b").on_ranks(pool, case, 3), tmp_path)


@pytest.mark.parametrize(("name", "case"), WITHOUT_DATA)
def test_as_one_spmd_program(
    pool: WorkerPool, table: Callable[..., Table], name: str, case: Case, tmp_path: Path
) -> None:
    """Programs are drawn at random, one per case."""
    check(name, case, table(name, schedule=SPMD).on_ranks(pool, case, 2), tmp_path)


def check(name: str, case: Case, found: list[Noted], folder: Path) -> None:
    """Compares what the ranks noted with one device."""
    if (name, case.name) not in _expected:
        _expected[name, case.name] = perform(case, None, str(folder))
    expected = _expected[name, case.name]
    assert expected.everywhere, "the case notes nothing"
    lines = differences(found[0].on_rank_0, expected.on_rank_0, "rank 0", case.tolerance)
    for rank, noted in enumerate(found):
        lines += differences(noted.everywhere, expected.everywhere, f"rank {rank}", case.tolerance)
    shown = "\n  ".join(lines[:25])
    assert not lines, f"{len(lines)} differences from one device:\n  {shown}"


def test_names_are_unique() -> None:
    names = [row.id for row in ROWS]
    assert len(set(names)) == len(names)
