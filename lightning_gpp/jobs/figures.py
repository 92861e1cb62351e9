"""Diagrams that jobs write: made without pyplot and in matplotlib's default style.

So the user's figures, backend and style stay as they are. matplotlib is imported when a diagram is
made. Colours are those of Okabe and Ito ("Color Universal Design", 2008).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 130
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7A7A7A")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


@contextlib.contextmanager
def diagram(path: Path, width_in: float, height_in: float) -> Iterator[Figure]:
    """An empty figure that is written to a file when the body has drawn into it."""
    import matplotlib.style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.style.context("default"):
        figure = Figure(
            figsize=(width_in, height_in), dpi=DPI, facecolor="white", layout="constrained"
        )
        yield figure
        FigureCanvasAgg(figure)
        figure.savefig(path, dpi=DPI)


def tidy(axes: Axes, x_label: str, y_label: str) -> None:
    """Labels, a light grid below the data, and no box around it."""
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
