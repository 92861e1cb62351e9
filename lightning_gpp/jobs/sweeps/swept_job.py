"""A job of a sweep: its overrides, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SweptJob:
    """How one job of a sweep ended.

    Attributes:
        number: of the job, counted from 0.
        overrides: its overrides, name -> value.
        seconds: that it took, None for a job that did not end.
        metrics: final metrics by name; empty after an error.
        error: first line of the error, None without one.
    """

    number: int
    overrides: Mapping[str, str]
    seconds: float | None
    metrics: Mapping[str, float]
    error: str | None = None


def split_override(text: str) -> tuple[str, str]:
    """Name and value of an override.

    >>> split_override("+trainer.max_steps=3"), split_override("~callbacks.timeline")
    (('trainer.max_steps', '3'), ('~callbacks.timeline', ''))
    """
    name, _, value = text.partition("=")
    return name.lstrip("+"), value
