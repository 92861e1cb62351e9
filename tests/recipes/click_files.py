"""Writes small files in the layouts of UCI Adult and of the Criteo log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

ADULT_HEADER = (
    "age,workclass,fnlwgt,education,education-num,marital-status,occupation,relationship,race,"
    "sex,capital-gain,capital-loss,hours-per-week,native-country,income-per-year"
)
CRITEO_HEADER = ",".join(
    ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
)


def adult_row(
    age: object = 39, workclass: str = "Private", sex: str = "Male", income: str = "<=50K"
) -> str:
    """A line of ``adult.csv``."""
    return (
        f"{age},{workclass},77516,Bachelors,13,Never-married,Sales,Unmarried,White,{sex},"
        f"0,0,40,Mexico,{income}"
    )


def write_adult(root: Path, rows: Sequence[str], header: str = ADULT_HEADER) -> Path:
    """``adult/adult.csv`` below the root."""
    path = root / "adult" / "adult.csv"
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def criteo_row(
    label: object = 0, integers: Sequence[object] = (), categories: Sequence[str] = ()
) -> list[str]:
    """The 40 fields of a line; what is not given is a gap."""
    numbers = [*map(str, integers), *[""] * (13 - len(integers))]
    return [str(label), *numbers, *categories, *[""] * (26 - len(categories))]


def write_criteo(
    root: Path,
    rows: Sequence[Sequence[str]],
    delimiter: str = ",",
    header: str | None = CRITEO_HEADER,
) -> Path:
    """``criteo/criteo_sample.txt`` below the root."""
    path = root / "criteo" / "criteo_sample.txt"
    path.parent.mkdir(exist_ok=True)
    lines = [delimiter.join(row) for row in rows]
    path.write_text("\n".join(lines if header is None else [header, *lines]) + "\n")
    return path


def write_small_tables(root: Path) -> None:
    """A few samples of both classes in both layouts."""
    incomes = ["<=50K", ">50K"] * 5
    write_adult(root, [adult_row(20 + i, income=income) for i, income in enumerate(incomes)])
    write_criteo(root, [criteo_row(i % 2, [i], ["a"]) for i in range(10)])
