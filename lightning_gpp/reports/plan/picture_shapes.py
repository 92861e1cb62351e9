"""What is on a picture, as data: rectangles, lines and texts, in the order in which they are drawn.

So that what is on a picture can be looked at without drawing it. Lengths are inches, from the upper
left corner to the right and down; widths of lines and sizes of letters are points, as printers have
them. Colours are texts such as ``"#0072B2"``.
"""

from __future__ import annotations

from dataclasses import dataclass

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A filled rectangle.

    Attributes:
        x: left end.
        y: upper end.
        width: to the right.
        height: down.
        face: colour of the inside.
        border: colour of the border.
        border_pt: width of the border; 0 where there is none.
    """

    x: float
    y: float
    width: float
    height: float
    face: str
    border: str = "#000000"
    border_pt: float = 0.0


@dataclass(frozen=True, slots=True)
class Polyline:
    """A line through points.

    Attributes:
        points: at least two.
        colour: of the line and its tip.
        width_pt: of the line.
        is_dotted: dots instead of a solid line.
        has_tip: whether it ends in an arrow.
    """

    points: tuple[Point, ...]
    colour: str
    width_pt: float
    is_dotted: bool = False
    has_tip: bool = False


@dataclass(frozen=True, slots=True)
class Text:
    """A line of text.

    Attributes:
        x: its middle, or its left end.
        y: the middle of its capital letters.
        text: what is written.
        size_pt: of the letters.
        colour: of the letters.
        is_bold: whether the letters are.
        is_mono: whether all letters have the same width.
        is_centred: whether ``x`` is its middle.
        is_on_line: whether what is behind it, such as a line, is covered.
    """

    x: float
    y: float
    text: str
    size_pt: float
    colour: str = "#000000"
    is_bold: bool = False
    is_mono: bool = True
    is_centred: bool = False
    is_on_line: bool = False


@dataclass(frozen=True, slots=True)
class Picture:
    """What is on a picture.

    Attributes:
        width: in inches.
        height: in inches.
        shapes: from the backmost to the foremost.
    """

    width: float
    height: float
    shapes: tuple[Rectangle | Polyline | Text, ...]


def curve(start: Point, end: Point, *, num_points: int = 25) -> tuple[Point, ...]:
    """A curve down from one point to another, upright at both ends (a cubic Bézier curve).

    >>> curve((0.0, 0.0), (2.0, 4.0), num_points=3)
    ((0.0, 0.0), (1.0, 2.0), (2.0, 4.0))
    """
    middle = (start[1] + end[1]) / 2
    found = []
    for number in range(num_points):
        t = number / (num_points - 1)
        shares = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3)
        x = (shares[0] + shares[1]) * start[0] + (shares[2] + shares[3]) * end[0]
        y = shares[0] * start[1] + (shares[1] + shares[2]) * middle + shares[3] * end[1]
        found.append((x, y))
    return tuple(found)
