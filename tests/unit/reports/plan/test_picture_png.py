"""Shapes as pixels: each is where it belongs, in its colour, with smooth edges."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from lightning_gpp.reports.plan.picture_png import DPI, write_png
from lightning_gpp.reports.plan.picture_shapes import Picture, Polyline, Rectangle, Text, curve

WHITE, RED, BLACK = (255, 255, 255), (255, 0, 0), (0, 0, 0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "picture.png"


def drawn(path: Path, *shapes: Rectangle | Polyline | Text) -> Image.Image:
    """A picture of two inches by one."""
    write_png(Picture(2.0, 1.0, shapes), path)
    image = Image.open(path).convert("RGB")
    assert image.size == (2 * DPI, DPI)
    return image


def colours(image: Image.Image, *, x_in: float | None = None, y_in: float | None = None) -> list:
    """The pixels of a column or a row."""
    if x_in is not None:
        return [image.getpixel((round(x_in * DPI), y)) for y in range(image.height)]
    return [image.getpixel((x, round(y_in * DPI))) for x in range(image.width)]


def test_a_rectangle_is_filled_up_to_its_border(path: Path) -> None:
    """Face from 0.5 to 1.5 inches (60 to 180 pixels), a border of 3 pixels (1.8 points) on it."""
    row = colours(drawn(path, Rectangle(0.5, 0.25, 1.0, 0.5, "#FF0000", "#000000", 1.8)), y_in=0.5)
    assert row[:58] == [WHITE] * 58 and row[182:] == [WHITE] * 58
    assert row[62:178] == [RED] * 116
    assert BLACK in row[58:62] and BLACK in row[178:182]


def test_a_rectangle_without_width_is_not_seen(path: Path) -> None:
    """A share of 0 %."""
    row = colours(drawn(path, Rectangle(0.5, 0.25, 0.0, 0.5, "#FF0000")), y_in=0.5)
    assert set(row) == {WHITE}


def test_a_line_is_as_wide_as_it_says_and_has_its_tip_at_the_end(path: Path) -> None:
    """Down at 1 inch; 1.8 points are 3 pixels, the tip is wider."""
    line = Polyline(((1.0, 0.1), (1.0, 0.9)), "#FF0000", 1.8, has_tip=True)
    image = drawn(path, line)
    assert sum(colour != WHITE for colour in colours(image, y_in=0.5)) in (3, 4)
    assert sum(colour != WHITE for colour in colours(image, y_in=0.85)) >= 5
    down = colours(image, x_in=1.0)
    assert all(colour != WHITE for colour in down[14:106]) and set(down[110:]) == {WHITE}


def test_a_dotted_line_has_gaps(path: Path) -> None:
    down = colours(drawn(path, Polyline(((1.0, 0.1), (1.0, 0.9)), "#000000", 0.9, True)), x_in=1.0)
    inside = down[14:106]
    assert 0.2 < sum(colour == WHITE for colour in inside) / len(inside) < 0.8


def test_a_curve_has_smooth_edges(path: Path) -> None:
    """Pixels that it covers in part are between its colour and white."""
    row = colours(drawn(path, Polyline(curve((0.5, 0.1), (1.5, 0.9)), "#000000", 0.9)), y_in=0.4)
    assert any(0 < colour[0] < 255 for colour in row)


def test_text_stands_where_it_should(path: Path) -> None:
    """Its capital letters are as far above as below ``y``; centred, as far left as right."""
    image = drawn(path, Text(1.0, 0.5, "HHHHH", 20.0, is_centred=True))
    left, top, right, bottom = image.convert("L").point(lambda value: 255 * (value < 128)).getbbox()
    assert (left + right) / 2 == pytest.approx(DPI, abs=2)
    assert (top + bottom) / 2 == pytest.approx(DPI / 2, abs=1.5)
    assert bottom - top == pytest.approx(0.73 * 20 / 72 * DPI, abs=2)


def test_text_on_a_line_covers_it(path: Path) -> None:
    line = Polyline(((0.1, 0.5), (1.9, 0.5)), "#FF0000", 0.9)
    text = Text(0.5, 0.5, "1.0 kB", 8.0, is_on_line=True)
    behind = colours(drawn(path, line), y_in=0.5)[60:100]
    assert all(colour != WHITE for colour in behind)
    assert WHITE in colours(drawn(path, line, text), y_in=0.5)[60:100]


def test_drawing_imports_no_matplotlib(path: Path) -> None:
    """It would take longer than a plan; its fonts are found without it."""
    code = (
        "import sys; from pathlib import Path\n"
        "from lightning_gpp.reports.plan.picture_png import write_png\n"
        "from lightning_gpp.reports.plan.picture_shapes import Picture, Text\n"
        f"write_png(Picture(1.0, 1.0, (Text(0.1, 0.5, 'a', 8.0),)), Path({str(path)!r}))\n"
        "print([n for n in ('matplotlib', 'numpy') if n in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
    assert path.read_bytes().startswith(b"\x89PNG")
