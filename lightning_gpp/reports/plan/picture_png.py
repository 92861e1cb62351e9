"""Draws the shapes of a picture into a PNG.

With Pillow, which matplotlib stands on: matplotlib itself takes longer to be imported than a plan
takes to be made. The letters are those of DejaVu, which matplotlib ships.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from lightning_gpp.reports.plan.picture_shapes import Picture, Point, Polyline, Rectangle, Text

DPI = 120
FINER = 4
"""Lines are drawn this many times larger, then made smaller, which makes their edges smooth."""

CAPITAL_HEIGHT = 0.73
"""Of the letters, in parts of their size."""

MARGIN_PX = 5
TIP_LENGTH_PX, TIP_WIDTH_PX = 8.0, 7.0
DOT_PX, SPACE_PX = 1.5, 2.5


def write_png(picture: Picture, path: Path) -> None:
    """Writes a picture as a PNG."""
    image = Image.new("RGB", (_px(picture.width), _px(picture.height)), "white")
    for shape in picture.shapes:
        if isinstance(shape, Rectangle):
            _draw_rectangle(image, shape)
        elif isinstance(shape, Polyline):
            _draw_line(image, shape)
        else:
            _draw_text(image, shape)
    image.save(path, dpi=(DPI, DPI))


def _px(length_in: float) -> int:
    return round(length_in * DPI)


def _draw_rectangle(image: Image.Image, shape: Rectangle) -> None:
    left, top = _px(shape.x), _px(shape.y)
    right, bottom = _px(shape.x + shape.width), _px(shape.y + shape.height)
    if right > left and bottom > top:
        # Pillow fills the lower right corner as well.
        ImageDraw.Draw(image).rectangle((left, top, right - 1, bottom - 1), shape.face)
    if shape.border_pt:
        corners = [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]
        # Goes on beyond the first corner, which is as full as the others then.
        _stroke(image, [*corners, (right, top)], shape.border, shape.border_pt)


def _draw_line(image: Image.Image, shape: Polyline) -> None:
    points = [(x * DPI, y * DPI) for x, y in shape.points]
    if all(a[0] == b[0] or a[1] == b[1] for a, b in itertools.pairwise(points)):
        points = [(round(x), round(y)) for x, y in points]  # sharp, as the boxes are
    if shape.has_tip:
        base, tip = _tip(points)
        _fill(image, tip, shape.colour)
        points[-1] = base
    for piece in _dots(points) if shape.is_dotted else [points]:
        _stroke(image, piece, shape.colour, shape.width_pt)


def _tip(points: Sequence[Point]) -> tuple[Point, list[Point]]:
    """The middle of the base of the triangle at the end of a line, and its corners."""
    (x, y), end = points[-2:]
    length = math.hypot(end[0] - x, end[1] - y)
    along = ((end[0] - x) / length, (end[1] - y) / length)
    base = (end[0] - TIP_LENGTH_PX * along[0], end[1] - TIP_LENGTH_PX * along[1])
    aside = (-along[1] * TIP_WIDTH_PX / 2, along[0] * TIP_WIDTH_PX / 2)
    corners = [(base[0] + side * aside[0], base[1] + side * aside[1]) for side in (-1, 1)]
    return base, [*corners, end]


def _dots(points: Sequence[Point]) -> list[list[Point]]:
    """The short lines of which a dotted one consists."""
    dots = []
    for start, end in itertools.pairwise(points):
        length = math.dist(start, end)
        for number in range(int(length / (DOT_PX + SPACE_PX)) + 1):
            first = number * (DOT_PX + SPACE_PX)
            ends = (first / length, min(1.0, (first + DOT_PX) / length)) if length else (0, 0)
            dots.append(
                [
                    (start[0] + t * (end[0] - start[0]), start[1] + t * (end[1] - start[1]))
                    for t in ends
                ]
            )
    return dots


def _stroke(image: Image.Image, points: Sequence[Point], colour: str, width_pt: float) -> None:
    width = round(width_pt * DPI / 72 * FINER)
    _smooth(image, points, colour, lambda mask, xy: mask.line(xy, 255, width, joint="curve"))


def _fill(image: Image.Image, points: Sequence[Point], colour: str) -> None:
    _smooth(image, points, colour, lambda mask, xy: mask.polygon(xy, 255))


def _smooth(
    image: Image.Image,
    points: Sequence[Point],
    colour: str,
    draw: Callable[[ImageDraw.ImageDraw, list[Point]], None],
) -> None:
    """Draws something through points with smooth edges."""
    xs, ys = zip(*points)
    left, top = int(min(xs)) - MARGIN_PX, int(min(ys)) - MARGIN_PX
    right, bottom = int(max(xs)) + MARGIN_PX, int(max(ys)) + MARGIN_PX
    mask = Image.new("L", ((right - left) * FINER, (bottom - top) * FINER))
    draw(ImageDraw.Draw(mask), [((x - left) * FINER, (y - top) * FINER) for x, y in points])
    image.paste(colour, (left, top, right, bottom), mask.reduce(FINER))


def _draw_text(image: Image.Image, shape: Text) -> None:
    x, y = shape.x * DPI, round((shape.y + CAPITAL_HEIGHT * shape.size_pt / 72 / 2) * DPI)
    font = _font(shape.size_pt, is_bold=shape.is_bold, is_mono=shape.is_mono)
    anchor = "ms" if shape.is_centred else "ls"
    draw = ImageDraw.Draw(image)
    if shape.is_on_line:
        draw.rectangle(draw.textbbox((x, y), shape.text, font, anchor), "white")
    draw.text((x, y), shape.text, shape.colour, font, anchor)


@functools.cache
def _font(size_pt: float, *, is_bold: bool, is_mono: bool) -> ImageFont.FreeTypeFont:
    name = f"DejaVuSans{'Mono' if is_mono else ''}{'-Bold' if is_bold else ''}.ttf"
    return ImageFont.truetype(str(_fonts() / name), size_pt * DPI / 72)


def _fonts() -> Path:
    """The folder of matplotlib's fonts; finding it imports matplotlib only where it is moved."""
    found = importlib.util.find_spec("matplotlib")
    for folder in (found and found.submodule_search_locations) or ():
        if (fonts := Path(folder, "mpl-data", "fonts", "ttf")).is_dir():
            return fonts
    import matplotlib

    return Path(matplotlib.get_data_path(), "fonts", "ttf")
