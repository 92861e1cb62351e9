"""How far predictions of a step are from what was measured, by kinds of what ranks do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_gpp.common.text_table import text_table
from lightning_gpp.simulate.timeline.span import SpanKind
from lightning_gpp.simulate.timeline.timeline import Timeline


@dataclass(frozen=True)
class Comparison:
    """A measured step beside predictions of it.

    Attributes:
        measured: the step.
        predicted: by what -> the predicted step (``"profile"``, ``"refit"``).
    """

    measured: Timeline
    predicted: Mapping[str, Timeline]

    def error(self, name: str) -> float:
        """By which part of it the predicted step is longer than the measured one."""
        return self.predicted[name].step_s / self.measured.step_s - 1

    def metrics(self) -> dict[str, float]:
        """Seconds of the steps and errors, by the names under which they are logged."""
        named = {"prediction/measured/step_s": self.measured.step_s}
        for name, timeline in self.predicted.items():
            named[f"prediction/{name}/step_s"] = timeline.step_s
            named[f"prediction/{name}/error"] = self.error(name)
        return named

    def table(self) -> str:
        """The parts of the step as a table, in milliseconds of the ranks' mean."""
        columns = [_seconds(timeline) for timeline in (self.measured, *self.predicted.values())]
        rows = []
        for part, known_s in columns[0].items():
            row = [part, f"{known_s * 1e3:.2f}"]
            for column in columns[1:]:
                error = f"{(column[part] / known_s - 1) * 100:+.0f} %" if known_s else ""
                row += [f"{column[part] * 1e3:.2f}", error]
            if any(column[part] > 0 for column in columns):
                rows.append(row)
        header = ["ms", "measured", *(h for name in self.predicted for h in (name, "error"))]
        return text_table(header, rows, left=["ms"])


def _seconds(timeline: Timeline) -> dict[str, float]:
    """Seconds of the ranks' mean in every kind of span, in none, and in all."""
    found = {
        kind.value: sum(span.duration_s for span in timeline.spans if span.kind is kind)
        / timeline.num_ranks
        for kind in SpanKind
    }
    idle_s = max(0.0, timeline.step_s - sum(found.values()))
    return {**found, "idle": idle_s, "step": timeline.step_s}
