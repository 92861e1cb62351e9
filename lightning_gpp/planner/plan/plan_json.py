"""The versioned JSON form of a plan: what people read, compare, edit and give to the strategy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_gpp.common.data_file import read_text
from lightning_gpp.common.strict_json import JsonFormat
from lightning_gpp.planner.plan.plan import Plan

FORMAT = JsonFormat("lightning_gpp.plan", version=1)


def plan_to_json(plan: Plan) -> str:
    """The plan as a JSON document.

    >>> from lightning_gpp.planner.plan.plan import Stage
    >>> plan = Plan((Stage(0, ("encoder",), devices=(0,)),))
    >>> plan_from_json(plan_to_json(plan)) == plan
    True
    """
    return FORMAT.dumps(plan)


def plan_from_json(text: str, *, source: str = "plan") -> Plan:
    """Reads :func:`plan_to_json`'s form.

    Args:
        text: the document.
        source: where it comes from, for error messages.

    Raises:
        ValueError: it is not a plan; the text names the place.
    """
    return FORMAT.loads(Plan, text, source=source)


def plan_from_data(data: Mapping[str, Any], *, source: str = "plan") -> Plan:
    """Reads :func:`plan_to_json`'s form, already parsed (a mapping of a configuration file).

    Raises:
        ValueError: it is not a plan; the text names the place.
    """
    return FORMAT.from_data(Plan, data, source=source)


def save_plan(plan: Plan, path: str | Path) -> None:
    """Writes a plan to a file."""
    Path(path).write_text(plan_to_json(plan), encoding="utf-8")


def load_plan(path: str | Path) -> Plan:
    """Reads a plan from a file.

    Raises:
        ValueError: there is no such file, or it is not a plan.
    """
    expected = "a plan file (JSON, as written by save_plan), or a list of stages with module names"
    return plan_from_json(read_text(path, expected), source=Path(path).name)
