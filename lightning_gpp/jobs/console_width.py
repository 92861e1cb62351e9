"""How wide the text of a job may be."""

from __future__ import annotations

import shutil

WIDEST = 140
DEFAULT = 100


def console_width() -> int:
    """Columns of the terminal, no more than people read; 100 where there is none."""
    return min(shutil.get_terminal_size((DEFAULT, 24)).columns, WIDEST)
