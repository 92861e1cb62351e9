"""Tables that fit a terminal: where the text of the flexible column goes."""

from __future__ import annotations

from lightning_gpp.common.text_table import MOST_LINES, text_table


def table(text: str, max_width: int) -> list[str]:
    rows = [["graphpipe", "19.1 ms", ""], ["piper", "", text]]
    found = text_table(
        ["planner", "step", "error"], rows, left=["planner", "error"], flexible="error",
        max_width=max_width,
    )  # fmt: skip
    return found.split("\n")


def test_a_short_text_stays_in_its_column() -> None:
    assert table("too many", 80)[-1] == "piper               too many"


def test_a_longer_text_takes_several_lines_of_its_column() -> None:
    """40 columns less those of the others are 20 for ten words of four letters and a gap each."""
    lines = table(" ".join(["word"] * 10), 40)
    assert [line[:5].strip() for line in lines[3:]] == ["piper", "", ""]
    assert {line[20:] for line in lines[3:]} == {"word word word word", "word word"}


def test_a_text_of_many_lines_goes_below_its_row() -> None:
    """Four words a line; one more than fit makes a line too many."""
    assert table(" ".join(["word"] * 4 * MOST_LINES), 40)[0].endswith("error")
    header, _, *rows = table(" ".join(["word"] * (4 * MOST_LINES + 1)), 40)
    assert "error" not in header
    assert rows[1] == "piper" and rows[2].startswith("    word")
    assert max(map(len, rows)) <= 40
