"""Runs the selected cases of a table together, once per number of ranks."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # worker processes import ``conformance`` too

from helpers.workers import WorkerError, WorkerPool

from conformance.case import SLOWER, Case, Noted, begun_case, run_cases

SECONDS_PER_CASE = 15.0 * SLOWER


@dataclass
class Table:
    """What the selected cases of one table noted, by number of ranks.

    Attributes:
        name: of the table.
        cases: those that pytest selected.
        options: of :func:`~conformance.case.run_cases`.
        notes: number of ranks -> case -> what every rank noted.
        errors: number of ranks -> case -> why it failed.
    """

    name: str
    cases: list[Case]
    options: dict[str, Any]
    notes: dict[int, dict[str, list[Noted]]] = field(default_factory=dict)
    errors: dict[int, dict[str, str]] = field(default_factory=dict)

    def on_ranks(self, pool: WorkerPool, case: Case, num_ranks: int) -> list[Noted]:
        """What every rank noted; the first question runs all cases."""
        if num_ranks not in self.notes:
            self._run(pool, num_ranks)
        if case.name in self.errors[num_ranks]:
            raise WorkerError(self.errors[num_ranks][case.name])
        return self.notes[num_ranks][case.name]

    def _run(self, pool: WorkerPool, num_ranks: int) -> None:
        notes = self.notes[num_ranks] = {}
        errors = self.errors[num_ranks] = {}
        left = list(self.cases)
        while left:
            with tempfile.TemporaryDirectory() as folder:
                limit_s = SECONDS_PER_CASE * (2 + len(left))
                names = [case.name for case in left]
                arguments = (self.name, names, num_ranks, folder)
                try:
                    ranks = pool.run(
                        run_cases, *arguments, **self.options, num_ranks=num_ranks, limit_s=limit_s
                    )
                except WorkerError as error:  # a rank died or hung; what others noted is lost
                    begun = begun_case(folder)
                    if begun is None:
                        errors |= dict.fromkeys(names, str(error))
                        return
                    errors[begun] = str(error)
                    left = [case for case in left if case.name != begun]
                    continue
            done = min(len(found) for found, _ in ranks)
            for index, case in enumerate(left[:done]):
                notes[case.name] = [found[index] for found, _ in ranks]
            texts = [text for _, text in ranks if text]
            if texts:  # the processes are not as new after a failure
                errors[left[done].name] = f"on {len(texts)} ranks, first:\n{texts[0]}"
                pool.close_workers()
            left = left[done + bool(texts) :]


@pytest.fixture(scope="session")
def tables() -> dict[tuple[str, str], Table]:
    """The tables of this run by module name and test."""
    return {}


@pytest.fixture
def table(
    request: pytest.FixtureRequest, tables: dict[tuple[str, str], Table]
) -> Callable[..., Table]:
    """A table by name, with the cases that pytest selected for this test."""

    def find(name: str, **options: Any) -> Table:
        test = request.node.originalname
        if (name, test) not in tables:
            chosen = {
                item.callspec.params["case"].name: item.callspec.params["case"]
                for item in request.session.items
                if getattr(item, "originalname", None) == test
                and item.callspec.params.get("name") == name  # type: ignore[attr-defined]
            }
            tables[name, test] = Table(name, list(chosen.values()), options)
        return tables[name, test]

    return find
