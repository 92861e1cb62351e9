"""Every case of the tables, by a plan that is drawn for two or three ranks: as on one device.

Samples of them run as planned on two and on four ranks, by micro-batches and as SPMD programs, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.alike import differences
from helpers.workers import WorkerPool

from conformance.case import SPMD, Case, Noted, cases_of, perform, perform_on_rank

pytestmark = [
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
AS_PLANNED = 8
"""One in so many cases runs as planned, and by a drawn plan with ``--all`` only."""

DRAWN = [
    pytest.param(*row.values, id=row.id, marks=pytest.mark.extra if n % AS_PLANNED == 1 else ())
    for n, row in enumerate(ROWS)
]
NEVER_CUT = {
    f"cases_{name}" for name in ("adversarial", "calls", "losses", "manual", "once", "raised")
}
"""About steps that need the whole batch, several calls of the forward, or manual optimization.

Or about errors, which leave a module whole in the default mode only.
"""
CUT = [row for row in ROWS if row.values[0] not in NEVER_CUT and not row.values[1].only_whole]
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


@pytest.mark.parametrize(("name", "case"), DRAWN)
def test_as_on_one_device(pool: WorkerPool, name: str, case: Case, tmp_path: Path) -> None:
    """Which plan a run gets depends on measured times; its results do not."""
    num_ranks = 2 + (len(case.name) % 4 == 0)
    check(pool, name, case, tmp_path, num_ranks=num_ranks, draws_plans=True)


@pytest.mark.sampled(AS_PLANNED, 1)
@pytest.mark.parametrize(("name", "case"), ROWS)
def test_as_planned(pool: WorkerPool, name: str, case: Case, tmp_path: Path) -> None:
    check(pool, name, case, tmp_path, num_ranks=2)


@pytest.mark.sampled(40, 3)
@pytest.mark.parametrize(("name", "case"), ROWS)
def test_on_four_ranks(pool: WorkerPool, name: str, case: Case, tmp_path: Path) -> None:
    check(pool, name, case, tmp_path, num_ranks=4)


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("name", "case"), CUT)
def test_with_a_step_for_every_micro_batch(
    pool: WorkerPool, name: str, case: Case, tmp_path: Path
) -> None:
    check(pool, name, case, tmp_path, num_ranks=3, schedule="1f1b", draws_plans=True)


@pytest.mark.sampled(12, 2)
@pytest.mark.parametrize(("name", "case"), WITHOUT_DATA)
def test_as_one_spmd_program(pool: WorkerPool, name: str, case: Case, tmp_path: Path) -> None:
    """Programs are drawn at random, one per case."""
    check(pool, name, case, tmp_path, num_ranks=2, schedule=SPMD)


FAILED_ONCE = {
    "forwards: compiled in place": {"schedule": "1f1b", "draws_plans": True},
    "shown: copies of callbacks": {"schedule": SPMD},
}
"""Not among the cases that are sampled for these modes."""


@pytest.mark.parametrize("row", FAILED_ONCE)
def test_in_another_mode(pool: WorkerPool, row: str, tmp_path: Path) -> None:
    name, case = next(each.values for each in ROWS if each.id == row)
    check(pool, name, case, tmp_path, num_ranks=2, **FAILED_ONCE[row])


def check(
    pool: WorkerPool, name: str, case: Case, folder: Path, num_ranks: int, **options: Any
) -> None:
    """Compares what the ranks note with one device."""
    arguments = (name, case.name, num_ranks, str(folder / "ranks"))
    found: list[Noted] = pool.run(perform_on_rank, *arguments, **options, num_ranks=num_ranks)
    expected = perform(case, None, str(folder / "alone"))
    assert expected.everywhere, "the case notes nothing"
    lines = differences(found[0].on_rank_0, expected.on_rank_0, "rank 0", case.tolerance)
    for rank, noted in enumerate(found):
        lines += differences(noted.everywhere, expected.everywhere, f"rank {rank}", case.tolerance)
    shown = "\n  ".join(lines[:25])
    assert not lines, f"{len(lines)} differences from one device:\n  {shown}"


def test_names_are_unique() -> None:
    names = [row.id for row in ROWS]
    assert len(set(names)) == len(names)
